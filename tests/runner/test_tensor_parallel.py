"""Several tensor shards sample the tokens of one rank: real processes, connected by gloo."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import GEMMA4_SIZES, make_checkpoint, node_config
from quantized_checkpoints import quantize
from ranks import Answer, Case, answer_of, answers_of_ranks

from pdserve.sampling_params import SamplingParams

GREEDY = SamplingParams(1, temperature=0.0, logprobs=3)
SAMPLED = SamplingParams(
    1, temperature=1.3, seed=11, top_k=60, top_p=0.95, min_tokens=3, frequency_penalty=0.3, logit_bias={5: 2.0}
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 131}),
    "llama-tied": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),  # both shards hold the one KV head
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen3": (
        "qwen3",
        {"attention_bias": True, "tie_word_embeddings": True, "vocab_size": 130, "num_hidden_layers": 1},
    ),
    "qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 2}),
    "mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 2}),
    "glm4-moe": ("glm4_moe", {"num_hidden_layers": 2}),
    "minimax-m2": ("minimax_m2", {"num_hidden_layers": 2}),
    "qwen3-moe-ep": ("qwen3_moe", {"num_hidden_layers": 2}),
    "gpt-oss-mxfp4": ("gpt_oss", {"num_hidden_layers": 2, "intermediate_size": 128}),
    "gpt-oss-mxfp4-ep": ("gpt_oss", {"num_hidden_layers": 2}),
    "gpt-oss-ep": ("gpt_oss", {"num_hidden_layers": 2}),
    "glm4-moe-ep": ("glm4_moe", {"num_hidden_layers": 2}),
    "qwen3-next": ("qwen3_next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "qwen3-next-ep": ("qwen3_next", {"num_key_value_heads": 1, "linear_num_key_heads": 4}),
    "qwen3.5": ("qwen3_5_text", {"linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "lfm2": ("lfm2", {"conv_bias": True, "tie_word_embeddings": True}),
    "lfm2-moe-ep": ("lfm2_moe", {}),
    "granite-4": ("granitemoehybrid", {}),
    "granite-4-ep": ("granitemoehybrid", {"mamba_n_groups": 4}),
    "nemotron-h": ("nemotron_h", {"hybrid_override_pattern": "M*-E", "use_bias": True}),
    "falcon-h1": ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True}),
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, "num_hidden_layers": 2}),
    "deepseek-v3-ep": ("deepseek_v3", {"num_hidden_layers": 2}),
    "ministral3": ("ministral3", {"num_hidden_layers": 2}),
    "mistral4-ep": ("mistral4", {"num_hidden_layers": 2}),
    "gemma4-e2b": ("gemma4_text", GEMMA4_SIZES["E2B"]),
    "gemma4-26b": ("gemma4_text", GEMMA4_SIZES["26B-A4B"]),
    "gemma4-12b-ep": ("gemma4_text", {**GEMMA4_SIZES["26B-A4B"], "num_global_key_value_heads": 1}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
}
FEW = [(name, "V1", 2) for name in ("llama-tied", "glm4-moe-ep", "qwen3-next")]
FEW += [("qwen3", "V2", 2)]


def case_of(directory: Path, version: str, tp: int) -> Case:
    """Shards of a model named "…-ep" hold whole experts."""
    lengths, num_tokens = ((5, 37, 20), 6) if version == "V1" else ((3, 18), 2)
    numbers = random.Random(3)
    prompts = tuple(tuple(numbers.randrange(128) for _ in range(length)) for length in lengths)
    backend = {"V1": "torch", "V2": "triton"}[version]
    ep = tp if directory.name.endswith("-ep") else 1
    config = node_config(directory, tp=tp, ep=ep, runner=version, attention_backend=backend, max_num_seqs=8)
    return Case(config, prompts, (GREEDY, SAMPLED), num_tokens, chunk=18)


def checkpoint_of(name: str, folder: Path) -> Path:
    family, sizes = MODELS[name]
    if "mxfp4" not in name:
        return make_checkpoint(folder / name, family, **sizes)
    return quantize(make_checkpoint(folder / f"plain-{name}", family, **sizes), folder / name, "mxfp4")


def check(actual: Answer, expected: Answer) -> None:
    assert [one.tokens for one in actual.outcomes] == [one.tokens for one in expected.outcomes]
    for ours, theirs in zip(actual.outcomes, expected.outcomes, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.top_ids == b.top_ids
                assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)


def check_shards(cases: list[tuple[str, str, int]], folder: Path) -> None:
    """Run all cases with equally many ranks in the same processes: starting Python takes longer than most cases."""
    directories = {name: checkpoint_of(name, folder) for name, _, _ in cases}
    for tp in sorted({tp for _, _, tp in cases}):
        those = [(name, version) for name, version, shards in cases if shards == tp]
        answers = answers_of_ranks([case_of(directories[name], version, tp) for name, version in those], tp)
        for (name, version), ranks in zip(those, answers, strict=True):
            expected = answer_of(case_of(directories[name], version, tp=1))
            for actual in ranks:
                check(actual, expected)


def test_shards_sample_the_tokens_and_logprobs_of_one_rank(tmp_path: Path) -> None:
    check_shards(FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_shards_of_every_model_sample_the_tokens_of_one_rank(tmp_path: Path, version: str, tp: int) -> None:
    check_shards([(model, version, tp) for model in MODELS if (model, version, tp) not in FEW], tmp_path)
