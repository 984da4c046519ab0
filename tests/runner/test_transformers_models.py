"""Models that run through transformers on V1's paged cache: exact, or refused by name."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_models import FAMILIES, make_any_checkpoint
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from fast_set import sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from model_table import EXACT, PAGE, as_page, causal_types, sweep, types_of
from safetensors.torch import load_file, save_file
from stepper import Stepper, copy_to
from torch import Tensor

import runner
from pdserve.errors import CheckpointError, ConfigError, PdserveError
from pdserve.model.model_config import load_model_config
from runner.models.from_transformers.attention_calls import window_of
from runner.models.from_transformers.loading import build_model
from runner.models.from_transformers.part import ModelPart
from runner.placement import TensorPlacement

NUM_TOKENS = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]


def assert_greedy_tokens_are_exact(directory: Path, impl: str = "auto", max_model_len: int = 500) -> None:
    config = node_config(directory, impl=impl, device=DEVICE, max_model_len=max_model_len)
    built = runner.build(config, lambda stage, fraction: None)
    reference = reference_model(directory)
    wanted = prompts(1, 15, 16, 33, 70)
    stepper = Stepper(built)
    try:
        for chunk, stagger in ((1 << 30, 0), (7, 2)):
            sequences = stepper.generate(wanted, NUM_TOKENS, chunk=chunk, stagger=stagger)
            for prompt, sequence in zip(wanted, sequences, strict=True):
                assert sequence.output == reference_greedy(reference, prompt, NUM_TOKENS)
        if config.model.state is None:  # else hits begin with snapshots: test_recurrent_state.py
            assert outputs_after_prefix_hits(stepper, wanted[-1]) == [sequences[-1].output] * 2
    finally:
        built.close()


def outputs_after_prefix_hits(stepper: Stepper, prompt: list[int]) -> list[list[int]]:
    """Return the outputs of two sequences that begin with the KV of a third one, which still runs."""
    stepper.keeps_windows = True
    first = stepper.add(prompt)
    stepper.step()
    blocks = stepper.live[first].blocks
    size = stepper.runner.kv_layout.block_size
    num_groups = stepper.runner.kv_layout.groups.num_groups
    hits = []
    for shared in (1, len(prompt) // size):
        hits.append(stepper.add(prompt))
        hit = stepper.live[hits[-1]]
        hit.blocks = blocks[: shared * num_groups].copy()
        hit.computed = shared * size
    while any(len(stepper.live[seq].output) < NUM_TOKENS for seq in hits):
        stepper.step(chunk=9)
    return [stepper.live[seq].output[:NUM_TOKENS] for seq in hits]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    assert_greedy_tokens_are_exact(make_any_checkpoint(tmp_path / "model", model_type), impl="transformers")


@pytest.mark.parametrize("model_type", sampled(FAMILIES, every=2))
def test_copied_kv_continues_on_another_runner(model_type: str, tmp_path: Path) -> None:
    """Each runner has blocks of its own numbers, as after a handoff."""
    directory = make_any_checkpoint(tmp_path / "model", model_type)
    config = node_config(directory, impl="transformers", max_model_len=200)
    source, target = (Stepper(runner.build(config, lambda stage, fraction: None), seed) for seed in (1, 2))
    (prompt,) = prompts(70)
    seq = source.add(prompt)
    while not source.live[seq].output:
        source.step(chunk=33)
    new = copy_to(target, source, seq)
    while len(target.live[new].output) < NUM_TOKENS:
        target.step()
    assert target.live[new].output == reference_greedy(reference_model(directory), prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    "model_type", ["bert", "dbrx", "gemma3", "llama4_text", "modernbert-decoder", "granitemoehybrid"]
)
def test_unusual_configs_and_models_are_exact(model_type: str, tmp_path: Path) -> None:
    """Models with a causal flag, nested sizes, a part for images, tuned queries, a head named decoder, a layer list."""
    assert_greedy_tokens_are_exact(make_any_checkpoint(tmp_path / "model", model_type))


def test_longrope_is_served_up_to_the_length_that_changes_it(tmp_path: Path) -> None:
    factors: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 100,
    } | factors
    overrides: dict[str, Any] = {"rope_parameters": rope, "original_max_position_embeddings": 100}
    directory = make_any_checkpoint(tmp_path / "model", "phi3", **overrides)
    assert_greedy_tokens_are_exact(directory, max_model_len=100)
    assert load_model_config(directory).max_position_embeddings == 100


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_native_family_runs_through_transformers_if_asked(family: str, tmp_path: Path) -> None:
    assert_greedy_tokens_are_exact(make_checkpoint(tmp_path / "model", family), "transformers")


def test_a_window_that_only_the_mask_knows_is_kept(tmp_path: Path) -> None:
    """PhiMoE's layers do not pass their window on."""
    directory = make_any_checkpoint(tmp_path / "model", "phimoe", sliding_window=8)
    assert_greedy_tokens_are_exact(directory)


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("falcon", {}, "FalconForCausalLM cannot run .* do not call a given attention function"),
        ("bloom", {}, "lacks 'max_position_embeddings'"),
        ("mamba", {}, r"Mamba state \(model_type mamba\)"),
        ("gptj", {}, "GPTJForCausalLM cannot run .* do not call a given attention function"),
        ("jamba", {}, "Mamba state"),
        ("olmo_hybrid", {}, r"linear attention \(model_type olmo_hybrid\)"),
        ("deepseek_v32", {}, "DeepSeek sparse attention"),
        ("bert", {"is_decoder": False}, r"BertLMHeadModel cannot run .* attends to later tokens"),
        ("diffllama", {}, "each layer attends once"),
        ("doge", {}, "layer 0 changes its mask"),
        ("lfm3", {"layer_types": ["conv", "full_attention", "conv"]}, "short convolutions"),
        ("llama4_text", {"attention_chunk_size": 16}, "neither causal nor a sliding window"),
        ("moshi", {"sliding_window": 8}, "more tokens than the 8 that transformers' cache keeps"),
        ("codegen", {}, "do not call a given attention function"),
        ("gemma3_text", {"use_bidirectional_attention": True}, r"neither causal nor a sliding window|later tokens"),
    ],
)
def test_a_model_that_would_be_wrong_is_refused_with_its_reason(
    model_type: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = make_any_checkpoint(tmp_path / "model", model_type, **overrides)
    with pytest.raises(PdserveError, match=reason):
        runner.build(node_config(directory), lambda stage, fraction: None)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", "deepseek_v3")
    change_config(directory, num_nextn_predict_layers=1)
    tensors = load_file(directory / "model.safetensors")
    layer = {name: one for name, one in tensors.items() if name.startswith("model.layers.2.")}
    assert layer
    extra = {name.replace(".2.", ".3.", 1): one.clone() for name, one in layer.items()}
    extra["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | extra, directory / "model.safetensors", {"format": "pt"})
    assert_greedy_tokens_are_exact(directory, "transformers")
    change_config(directory, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.layers\.3"):
        runner.build(node_config(directory, impl="transformers"), lambda stage, fraction: None)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tensor_that_the_library_keeps_in_float32_is_not_rounded(load_format: str, tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    third = torch.full((4,), 1 / 3)
    tensors = {key: one.bfloat16() for key, one in load_file(directory / "model.safetensors").items()}
    save_file(tensors | {name: third}, directory / "model.safetensors", {"format": "pt"})
    placement = TensorPlacement(torch.device("cpu"), torch.bfloat16, torch.bfloat16)
    weights = load_file(directory / "model.safetensors") if load_format == "auto" else None
    model = build_model(directory, placement, "eager", ModelPart(3, range(3)), weights)
    kept = model.get_buffer(name)
    assert (kept.dtype, model.lm_head.weight.dtype) == (torch.float32, torch.bfloat16)
    assert load_format == "dummy" or torch.equal(kept, third)


def change_config(directory: Path, **fields: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", "olmo2")
    change_config(directory, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.3"):
        runner.build(node_config(directory), lambda stage, fraction: None)


Attends = Callable[[Tensor, Tensor], Tensor]
PATTERNS: dict[str, Attends] = {
    "chunks": lambda query, key: (key <= query) & (query // 8 == key // 8),
    "all": lambda query, key: key >= 0,
    "strided": lambda query, key: (key <= query) & ((query - key) % 2 == 0),
    "prefix": lambda query, key: (key <= query) | (key < 3),
    "none": lambda query, key: key < 0,
}


@given(num_positions=st.integers(2, 300), window=st.integers(1, 300))
@settings(deadline=None)
def test_the_window_of_a_mask_is_read_from_its_predicate(num_positions: int, window: int) -> None:
    size = window_of(lambda b, h, q, k: (k <= q) & (k > q - window), num_positions, torch.device("cpu"))
    assert size == (window if window < num_positions else None)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_mask_that_is_neither_causal_nor_a_window_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="neither causal nor a sliding window"):
        window_of(lambda b, h, q, k: PATTERNS[name](q, k), 50, torch.device("cpu"))


def test_the_table_of_models_lists_every_type_once() -> None:
    page = PAGE.read_text()
    types = types_of(page)
    assert len(types) == len(set(types))
    if page.splitlines()[0].endswith(f" {transformers.__version__}"):
        assert sorted(types) == causal_types()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_causal_type_of_transformers_is_exact_or_refused(tmp_path: Path) -> None:
    """No type yields other tokens than its own eager forward."""
    outcomes = sweep(tmp_path, assert_greedy_tokens_are_exact)
    if "WRITE_MODEL_TABLE" in os.environ:  # by scripts/model-table
        PAGE.write_text(as_page(outcomes))
    assert as_page(outcomes) == PAGE.read_text()
    assert sum(outcome == EXACT for outcome in outcomes.values()) >= 92
