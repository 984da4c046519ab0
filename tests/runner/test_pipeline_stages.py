"""Pipeline stages sample the tokens of one rank: real processes, connected by gloo, with steps in flight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import make_checkpoint, node_config
from staged_node import Outputs, Request, StagedNode, generate, generate_alone

from pdserve.config.node_config import NodeConfig
from pdserve.sampling_params import SamplingParams

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 131}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen3-small": ("qwen3", {"num_hidden_layers": 2}),
    "glm4-moe-ep": ("glm4_moe", {"first_k_dense_replace": 2}),
    "qwen3-next": ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "qwen3.5": ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention", "linear_attention"] * 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "granite-4": (
        "granitemoehybrid",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "nemotron-h": ("nemotron_h", {"hybrid_override_pattern": "EM*-*MM*"}),
    "falcon-h1": ("falcon_h1", {"num_hidden_layers": 4}),
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek-v3-ep": ("deepseek_v3", {"topk_group": 4}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
}
NUM_GROUPS = {"qwen3-windows": 4}  # KV cache groups, by model; 1 by default
Case = tuple[str, str, int, int, tuple[int, ...] | None]  # model, runner, stages, shards, layers


def config_of(directory: Path, version: str, **options: Any) -> NodeConfig:
    backend = {"V1": "torch", "V2": "triton"}[version]
    return node_config(
        directory,
        runner=version,
        attention_backend=backend,
        max_num_seqs={"V1": 5, "V2": 3}[version],
        max_batch_tokens=16,
        max_model_len=96,
        num_blocks=18 * NUM_GROUPS.get(directory.name, 1),
        state_slots=7,
        block_size=8,
        kernel_block_size=8,
        **options,
    )


def requests_of(version: str) -> list[Request]:
    """Prompts of several steps, several choices, every sampling parameter, and a cancelled request.

    Slots and blocks do not suffice for all requests at once.
    """
    numbers = random.Random(5)
    seeded = SamplingParams(
        max_tokens=6, n=2, temperature=1.2, seed=9, top_k=50, top_p=0.95, min_tokens=3, logprobs=2, logit_bias={5: 2.0}
    )
    penalized = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.6)
    greedy = SamplingParams(max_tokens=7, temperature=0.0, logprobs=3, ignore_eos=True)
    never = 1 << 30
    # The cancelled request has a token on its way, for a position in a row that soon holds another prompt.
    kinds = [(30, greedy, 3), (5, penalized, never), (9, penalized, never), (7, penalized, never)]
    kinds += [(4, penalized, never), (50, greedy, never), (21, seeded, never)]
    if version == "V2":
        short = [msgspec.structs.replace(sampling, max_tokens=4) for sampling in (seeded, greedy, penalized)]
        kinds = [(18, short[0], never), (3, short[1], 2), (5, short[2], never)]
    return [
        Request(tuple(numbers.randrange(128) for _ in range(length)), sampling, cancelled_after)
        for length, sampling, cancelled_after in kinds
    ]


def check(requests: list[Request], actual: Outputs, expected: Outputs) -> None:
    for rid, request in enumerate(requests):
        if request.cancelled_after < len(expected[rid, 0]):
            assert len(actual[rid, 0]) == request.cancelled_after
            expected[rid, 0] = expected[rid, 0][: request.cancelled_after]

    def tokens(outputs: Outputs) -> dict[tuple[int, int], list[int]]:
        return {key: [sample.token_id for sample in samples] for key, samples in outputs.items()}

    assert tokens(actual) == tokens(expected)
    for key, samples in expected.items():
        for ours, theirs in zip(actual[key], samples, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.top_ids == theirs.logprobs.top_ids
                assert ours.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=1e-4)


def check_cases(cases: list[Case], folder: Path) -> None:
    """Run all cases with equally many ranks in the same processes: starting them takes longer than most cases."""
    for count in sorted({pp * tp for _, _, pp, tp, _ in cases}):
        with StagedNode(count) as node:
            for model, version, pp, tp, stage_layers in cases:
                if pp * tp != count:
                    continue
                directory = folder / model
                if not directory.exists():
                    family, options = MODELS[model]
                    num_layers = len(options.get("layer_types", range(4)))
                    make_checkpoint(directory, family, **{"num_hidden_layers": num_layers, **options})
                config = config_of(
                    directory,
                    version,
                    pp=pp,
                    tp=tp,
                    ep=tp if model.endswith("-ep") else 1,
                    stage_layers=stage_layers,
                )
                requests = requests_of(version)
                outputs = generate(node.started(config), config, requests, at_once=5)
                check(requests, outputs, generate_alone(config_of(directory, version), requests))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_sample_the_tokens_of_one_rank(tmp_path: Path) -> None:
    check_cases([("llama", "V1", 2, 1, (1, 3)), ("qwen3-small", "V2", 2, 1, None)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stages_of_every_model_and_runner_sample_the_tokens_of_one_rank(tmp_path: Path) -> None:
    splits = [(2, 1, None), (3, 1, (1, 2, 1)), (2, 2, None)]
    recurrent = ("qwen3-next", "qwen3.5", "lfm2")  # each stage needs both kinds of layers
    models = [model for model in MODELS if model not in ("qwen3-small", *recurrent)]
    cases: list[Case] = [(model, version, *split) for model in models for version in ("V1", "V2") for split in splits]
    cases += [(model, version, 2, tp, None) for model in recurrent for version in ("V1", "V2") for tp in (1, 2)]
    check_cases(cases, tmp_path)
