"""Configuration of models with recurrent layers: KV and state in bytes, slots, ranks, and refused combinations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from make_checkpoint import SHAPES

from cli.explain import as_text, describe
from cli.plan.costs import Shape
from pdserve.config.attention_backends import Platform
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import ParallelConfig, choose_parallel_config, num_parameters
from pdserve.config.resolution.state_slots import most_slots
from pdserve.config.resolve import resolve
from pdserve.errors import CapacityError, CheckpointError, ConfigError
from pdserve.kv.states import GatedDeltaSpec
from pdserve.model.model_config import ModelConfig, load_model_config

H200 = DeviceInfo(kind="cuda", index=0, name="H200", memory=140 << 30)
GPU = Platform(device="cuda", has_triton=True, has_flashinfer=True)
QWEN3_NEXT = SHAPES["qwen3-next-12l"] | {"num_hidden_layers": 48}  # 80B


def load(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return load_model_config(directory)


def resolved(directory: Path, config: dict[str, Any] | None = None, **options: Any) -> NodeConfig:
    load(directory, SHAPES["qwen3-next-12l"] if config is None else config)
    return resolve(NodeOptions(model=str(directory), load_format="dummy", **options), H200, {}, GPU)


def test_qwen3_next_80b_has_24576_bytes_per_token_and_75_mb_of_state(tmp_path: Path) -> None:
    model = load(tmp_path, QWEN3_NEXT)
    assert len(model.kv_layers) == 12
    assert model.kv_layers[:2] == (3, 7)
    assert len(model.attention) == 12
    assert model.rope.rotary_dim == 64
    assert 79e9 < num_parameters(model, choose_parallel_config(model, 1, 1).position(0)) < 80.5e9
    shape = Shape.of(model)
    assert shape.kv_bytes == 24_576
    assert 75e6 < shape.state_bytes < 78e6


def test_qwen3_5_is_read_with_and_without_its_vision_tower(tmp_path: Path) -> None:
    text = SHAPES["qwen3.5-8l"]
    alone = load(tmp_path, text)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    fields = {name: value for name, value in text.items() if name not in ("architectures", "rope_theta")}
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": {**fields, "rope_parameters": rope},
    }
    model = load(tmp_path, whole)
    assert (model.architecture, model.multimodal) == ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    assert msgspec.structs.replace(model, multimodal="", unread_fields=alone.unread_fields) == alone


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 12}, "linear_attention only"),
        ({"layer_types": ["linear_attention"]}, "1 layer_types for 12 layers"),
        ({"layer_types": ["mamba"] * 12}, "layer type 'mamba'; supported are linear_attention, full_attention"),
        ({"linear_num_key_heads": 12}, "32 value heads cannot share 12 key heads"),
    ],
)
def test_configs_that_describe_no_such_model_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path, SHAPES["qwen3-next-12l"] | changes)


def test_a_model_whose_layers_all_attend_has_no_state(tmp_path: Path) -> None:
    config = resolved(tmp_path, SHAPES["qwen3-next-12l"] | {"layer_types": ["full_attention"] * 12})
    assert config.state_layout is None
    assert config.kv_layout.num_layers == 12


def test_slots_and_blocks_divide_the_memory(tmp_path: Path) -> None:
    config = resolved(tmp_path, kv_cache_memory=20 << 30)
    layout = config.kv_layout
    states = config.state_layout
    assert states is not None
    assert (layout.num_layers, states.num_layers) == (3, 9)
    assert (20 << 30) - layout.block_bytes < layout.total_bytes + states.total_bytes <= 20 << 30
    per_sequence = 4096 * layout.bytes_per_token + states.slot_bytes
    assert states.num_slots == min((20 << 30) // per_sequence, most_slots(config.max_num_seqs))
    assert any(choice.startswith(f"state_slots={states.num_slots}: ") for choice in config.choices)
    assert config.compat_fields["state_dtype"] == "bfloat16"
    few = resolved(tmp_path, kv_cache_memory=20 << 30, state_slots=5)
    assert few.state_layout is not None
    assert few.state_layout.num_slots == 5
    assert few.kv_layout.num_blocks > layout.num_blocks


def test_the_memory_that_an_error_asks_for_suffices(tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as refused:
        resolved(tmp_path, kv_cache_memory=256 << 20, max_model_len=262144)
    needed = int(str(refused.value).partition("--kv-cache-memory ")[2].split()[0])
    assert resolved(tmp_path, kv_cache_memory=needed, max_model_len=262144).max_model_len == 262144


def test_ranks_hold_their_part_of_kv_and_state(tmp_path: Path) -> None:
    config = resolved(tmp_path, pp=2, tp=2, stage_layers=(4, 8), kv_cache_memory=10 << 30)
    ranks = [config.for_rank(rank, H200) for rank in range(4)]
    assert [(rank.share.first_layer, rank.kv_layout.num_layers) for rank in ranks] == [(0, 1)] * 2 + [(1, 2)] * 2
    shares = [rank.state_share for rank in ranks]
    assert [(s.first_layer, s.num_layers, s.total_layers, s.shard) for s in shares if s is not None] == [
        (0, 3, 9, 0),
        (0, 3, 9, 1),
        (3, 6, 9, 0),
        (3, 6, 9, 1),
    ]
    for rank in ranks:
        assert rank.state_layout is not None
        assert rank.state_share is not None
        assert rank.state_layout.num_layers == rank.state_share.num_layers
        assert isinstance(rank.state_layout.spec, GatedDeltaSpec)
        assert rank.state_layout.spec.key_heads == 8
        assert rank.state_layout.spec.value_heads == 16
        assert rank.kv_layout.total_bytes + rank.state_layout.total_bytes <= 10 << 30


@pytest.mark.parametrize(
    ("pp", "tp", "stage_layers", "named"),
    [
        (1, 32, None, "attention heads, 16"),
        (2, 1, (2, 10), "stage 0 has layers 0 … 1 and none that attends.*Layers 3, 7, 11 attend"),
        (2, 1, (11, 1), "stage 1 has layers 11 … 11 and none with recurrent state"),
    ],
)
def test_splits_without_a_kind_of_layer_are_refused(
    pp: int, tp: int, stage_layers: tuple[int, ...] | None, named: str, tmp_path: Path
) -> None:
    model = load(tmp_path, SHAPES["qwen3-next-12l"])
    with pytest.raises(ConfigError, match=named):
        choose_parallel_config(model, pp, tp, stage_layers)


def test_tp_must_divide_the_key_heads(tmp_path: Path) -> None:
    model = load(tmp_path, SHAPES["qwen3-next-12l"] | {"linear_num_key_heads": 2, "num_key_value_heads": 4})
    with pytest.raises(ConfigError, match="tp 4 does not divide the model's key heads of recurrent layers, 2"):
        choose_parallel_config(model, 1, 4)
    assert choose_parallel_config(model, 1, 2) == ParallelConfig((12,), 2)


def test_options_without_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state_slots 5: LlamaForCausalLM has no recurrent layers"):
        resolved(tmp_path, SHAPES["llama-8b"], state_slots=5)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"speculate": "lookup"}, "speculate lookup"), ({"synthetic_acceptance": 2.0}, "synthetic_a")],
)
def test_stages_with_states_verify_no_drafts(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    """One stage verifies drafts."""
    problem = f"{named}.*Qwen3NextForCausalLM has recurrent layers, and with pp 3 its first stages learn too late"
    with pytest.raises(ConfigError, match=problem):
        resolved(tmp_path, SHAPES["qwen3-next-12l"], pp=3, **options)
    assert resolved(tmp_path, SHAPES["qwen3-next-12l"], **options).max_drafts == 3
    config = resolved(tmp_path, SHAPES["qwen3-next-12l"], pp=3, speculate="auto")
    assert config.max_drafts == 0


def _next(directory: Path) -> Path:
    load(directory, SHAPES["qwen3-next-12l"])
    return directory


def test_explain_shows_the_state(tmp_path: Path) -> None:
    config = resolved(tmp_path, kv_cache_memory=20 << 30)
    states = config.state_layout
    assert states is not None
    assert describe(config)["state_layout"] == {
        "num_slots": states.num_slots,
        "bytes_per_sequence": states.slot_bytes,
        "num_layers": 9,
    }
    assert f"state      {states.num_slots} slots × 9 recurrent layers" in as_text(config)
    assert f"{states.slot_bytes} bytes per sequence" in as_text(config)
