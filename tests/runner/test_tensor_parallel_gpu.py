"""Tensor shards on two GPUs: NCCL, also in CUDA graphs, and equally many KV blocks on all shards.

With pytest and transformers as the only development tools:

    PYTHONPATH=.:tests/support python -m pytest -c /dev/null --noconftest tests/runner/test_tensor_parallel_gpu.py
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from ranks import Case, answer_of, answers_of_ranks

from pdserve.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(600),
]

GREEDY = SamplingParams(1, temperature=0.0, logprobs=3)
SAMPLED = SamplingParams(1, temperature=1.3, seed=11, top_k=60, top_p=0.95, frequency_penalty=0.3)
FORMS = [("V1", "float32"), ("V2", "float32"), ("V2", "bfloat16")]


def case_of(directory: Path, version: str, dtype: str, tp: int, ep: int = 1) -> Case:
    numbers = random.Random(3)
    prompts = tuple(tuple(numbers.randrange(128) for _ in range(length)) for length in (5, 37, 20, 300))
    config = node_config(
        directory,
        tp=tp,
        ep=ep,
        runner=version,
        attention_backend="triton",
        device="cuda",
        dtype=dtype,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
    )
    config = msgspec.structs.replace(config, measure_kv_memory=True)
    return Case(config, prompts, (GREEDY, SAMPLED), num_tokens=20, chunk=100)


def test_shards_sample_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    """In bfloat16 the order of a sum changes it, so only the shards must agree."""
    directory = make_checkpoint(tmp_path / "model", "qwen3", attention_bias=True, vocab_size=131)
    answers = answers_of_ranks([case_of(directory, version, dtype, tp=2) for version, dtype in FORMS], 2)
    for (version, dtype), (one, other) in zip(FORMS, answers, strict=True):
        assert one == other
        if dtype == "float32":
            expected = answer_of(case_of(directory, version, dtype, tp=1))
            tokens = [outcome.tokens for outcome in one.outcomes]
            assert tokens == [outcome.tokens for outcome in expected.outcomes], version


def test_shards_with_whole_experts_sample_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3_moe", vocab_size=131)
    cases = [case_of(directory, version, "float32", tp=2, ep=2) for version in ("V1", "V2")]
    for case, ranks in zip(cases, answers_of_ranks(cases, 2), strict=True):
        expected = answer_of(case_of(directory, case.config.decision.runner, "float32", 1))
        for actual in ranks:
            assert [one.tokens for one in actual.outcomes] == [one.tokens for one in expected.outcomes]
