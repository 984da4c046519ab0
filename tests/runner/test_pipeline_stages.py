"""Nodes of several pipeline stages say what one rank says: real processes, which talk by gloo, steps in flight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, node_config
from staged_node import Outputs, Request, StagedNode, generate, generate_alone

from pdserve.config import NodeConfig
from pdserve.records import SamplingParams

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 131}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
}
Case = tuple[str, str, int, int, tuple[int, ...] | None]  # model, runner, stages, shards, layers of stages


def config_of(directory: Path, version: str, **options: Any) -> NodeConfig:
    backend = {"V1": "torch", "V2": "triton"}[version]
    return node_config(
        directory,
        runner=version,
        attention_backend=backend,
        max_num_seqs={"V1": 8, "V2": 3}[version],
        max_batch_tokens=16,
        max_model_len=96,
        num_blocks=16,
        block_size=8,
        kernel_block_size=8,
        **options,
    )


def requests_of(version: str) -> list[Request]:
    """Prompts that take several steps, several choices, everything that sampling can, and one that is cancelled.

    There are not blocks for all of V1's, nor seats for V2's: some make way, and places are soon somebody else's.
    """
    numbers = random.Random(5)
    seeded = SamplingParams(
        max_tokens=6, n=2, temperature=1.2, seed=9, top_k=50, top_p=0.95, min_tokens=3, logprobs=2, logit_bias={5: 2.0}
    )
    penalized = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.6)
    greedy = SamplingParams(max_tokens=7, temperature=0.0, logprobs=3, ignore_eos=True)
    never = 1 << 30
    kinds = [(21, seeded, never), (5, greedy, 3), (9, penalized, never), (37, greedy, never), (30, seeded, never)]
    if version == "V2":
        kinds = [(18, seeded, never), (3, greedy, 2), (5, penalized, never), (4, greedy, never)]
    return [
        Request(tuple(numbers.randrange(128) for _ in range(length)), sampling, cancelled_after)
        for length, sampling, cancelled_after in kinds
    ]


def check(requests: list[Request], found: Outputs, expected: Outputs) -> None:
    for rid, request in enumerate(requests):
        if request.cancelled_after < len(expected[rid, 0]):
            assert len(found[rid, 0]) == request.cancelled_after
            expected[rid, 0] = expected[rid, 0][: request.cancelled_after]

    def tokens(outputs: Outputs) -> dict[tuple[int, int], list[int]]:
        return {key: [sample.token_id for sample in samples] for key, samples in outputs.items()}

    assert tokens(found) == tokens(expected)
    for key, samples in expected.items():
        for ours, theirs in zip(found[key], samples, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.top_ids == theirs.logprobs.top_ids
                assert ours.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=1e-4)


def check_cases(cases: list[Case], folder: Path) -> None:
    """All cases of as many ranks with the same processes: starting them takes longer than most cases."""
    for count in sorted({pp * tp for _, _, pp, tp, _ in cases}):
        with StagedNode(count) as node:
            for model, version, pp, tp, stage_layers in cases:
                if pp * tp != count:
                    continue
                directory = folder / model
                if not directory.exists():
                    family, options = MODELS[model]
                    make_checkpoint(directory, family, num_hidden_layers=4, **options)
                config = config_of(directory, version, pp=pp, tp=tp, stage_layers=stage_layers)
                requests = requests_of(version)
                found = generate(node.started(config), config, requests, at_once=4)
                check(requests, found, generate_alone(config_of(directory, version), requests))


def test_stages_say_what_one_rank_says(tmp_path: Path) -> None:
    check_cases([("llama", "V1", 3, 1, (1, 2, 1)), ("qwen3-windows", "V2", 3, 1, None)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_model_and_runner(tmp_path: Path) -> None:
    splits = [(2, 1, None), (2, 1, (1, 3)), (3, 1, None), (2, 2, None)]
    check_cases(
        [(model, version, *split) for model in MODELS for version in ("V1", "V2") for split in splits], tmp_path
    )
