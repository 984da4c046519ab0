"""KV cache groups in a node's configuration: what config.json says of windows, sizes, and what ``explain`` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import SHAPES

from cli.explain import as_text, describe
from cli.plan.costs import Shape
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import num_parameters
from pdserve.config.resolve import resolve
from pdserve.errors import CapacityError
from pdserve.kv.groups import KVCacheGroups, KVHeads
from pdserve.model.model_config import load_model_config
from pdserve.rpc.protobuf import layout_from_pb, layout_to_pb

HOST = DeviceInfo(kind="cpu", index=0, name="CPU", memory=64 << 30)
TYPES = ["sliding_attention", "full_attention"]
MINISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "sliding_window": 100,
    "layer_types": TYPES * 4,
    "torch_dtype": "bfloat16",
}
GEMMA = MINISTRAL | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16}
del GEMMA["layer_types"]
LAYER_BYTES = 2 * 2 * 16 * 2  # bytes per token: K and V of two heads of 16 in 16 bits


def resolved(path: Path, model: dict[str, Any], **options: Any) -> NodeConfig:
    (path / "config.json").write_text(json.dumps(model))
    return resolve(NodeOptions(**{"model": str(path), "load_format": "dummy", **options}), HOST, {})


def test_layers_of_two_kinds_are_two_groups(tmp_path: Path) -> None:
    config = resolved(tmp_path, MINISTRAL)
    layout = config.kv_layout
    assert layout.groups == KVCacheGroups((None, 100), (1, 0) * 4)
    assert (layout.num_layers, layout.block_bytes) == (4, 16 * 4 * LAYER_BYTES)
    assert layout.bytes_per_token == 4 * LAYER_BYTES
    assert config.compat_fields["kv_groups"] == "4 layers of full, 4 layers of 100"
    assert layout_from_pb(layout_to_pb(layout)) == layout
    assert Shape.of(config.model).kv_bytes == 4 * LAYER_BYTES


GEMMA_4 = GEMMA | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}


def test_layers_of_unlike_heads_are_groups_of_equal_bytes(tmp_path: Path) -> None:
    config = resolved(tmp_path, GEMMA_4)
    layout = config.kv_layout
    full = KVHeads(2, 32)
    sliding = KVHeads(4, 16)
    assert layout.groups.heads == (full, sliding, sliding, sliding)
    assert layout.block_bytes == 16 * 2 * 2 * 2 * full.size
    assert layout.bytes_per_token == 2 * 2 * 2 * full.size == Shape.of(config.model).kv_bytes
    text = "2 layers of full and 2 KV heads × 32, 3 × (2 layers of 100 and 4 KV heads × 16)"
    assert config.compat_fields["kv_groups"] == text
    assert f"4: {text} tokens" in as_text(config)
    assert describe(config)["kv_groups"]["heads"] == [[2, 32]] + [[4, 16]] * 3
    sizes = describe(config)["longest_sequence_bytes"]
    assert sizes["without_windows"] == 8192 * 2 * 2 * (2 * full.size + 6 * sliding.size)
    shards = resolved(tmp_path, GEMMA_4, tp=4)
    assert shards.for_rank(3, HOST).kv_layout.of_group(0).num_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None, "layer_types": None}, (None,)),
        ({"layer_types": None}, (100,)),
        ({"sliding_window": 8192}, (None,)),  # no sequence is longer
    ],
)
def test_layers_of_one_kind_are_one_group(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None]) -> None:
    layout = resolved(tmp_path, MINISTRAL | changes).kv_layout
    assert layout.groups == KVCacheGroups(windows)
    assert layout.num_layers == 8
    assert layout.num_tokens == layout.num_blocks * layout.block_size


def test_stages_have_layers_of_each_group(tmp_path: Path) -> None:
    config = resolved(tmp_path, MINISTRAL, stage_layers=(3, 5), pp=2)
    layouts = [config.for_rank(rank, HOST).kv_layout for rank in range(2)]
    assert [layout.num_layers for layout in layouts] == [2, 3]
    assert layouts[0].num_blocks == layouts[1].num_blocks
    assert config.whole_layout(config.kv_layout).num_layers == 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (100,) * 5 + (None,) + (100,) * 2),
        ({"sliding_window_pattern": 4}, ((100,) * 3 + (None,)) * 2),
        ({"layer_types": TYPES * 4}, (100, None) * 4),
        ({"layer_types": ["full_attention"] * 8, "sliding_window": 0}, ()),
        ({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}, ()),
    ],
)
def test_windows_of_a_model_of_the_library_come_from_its_config(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | changes))
    assert load_model_config(tmp_path).windows == windows


def test_memory_of_windows_does_not_grow_with_the_longest_sequence(tmp_path: Path) -> None:
    memory = (8192 // 16 + 200) * 16 * 4 * LAYER_BYTES  # the full group, and 200 blocks for windows
    config = resolved(tmp_path, MINISTRAL, kv_cache_memory=memory, max_batch_tokens=2048)
    assert config.max_model_len == 8192
    with pytest.raises(CapacityError, match="no room for one sequence of 8192 tokens"):
        resolved(tmp_path, MINISTRAL, kv_cache_memory=memory - (64 << 14), max_batch_tokens=2048, max_model_len=8192)
    assert resolved(tmp_path, MINISTRAL | {"layer_types": None}, kv_cache_memory=memory).max_model_len == 8192


def test_explain_shows_how_much_memory_windows_take(tmp_path: Path) -> None:
    config = resolved(tmp_path, MINISTRAL)
    fields = describe(config)
    text = as_text(config)
    assert fields["kv_groups"] == {"windows": [None, 100], "layers": [1, 0] * 4, "heads": []}
    held = fields["longest_sequence_bytes"]
    assert held["without_windows"] == 8192 * 8 * LAYER_BYTES
    assert held["with_windows"] == (8192 + 9 * 16) * 4 * LAYER_BYTES
    assert "2: 4 layers of full, 4 layers of 100 tokens" in text
    assert "0 layers are padding" in text
    assert "KV groups" not in as_text(resolved(tmp_path, MINISTRAL | {"sliding_window": None, "layer_types": None}))


@pytest.mark.parametrize(
    ("shape", "groups", "full_bytes", "parameters"),
    [("gemma-4-e2b", 3, 6144, 5.03e9), ("gemma-4-26b-a4b", 10, 20480, 25.9e9), ("gemma-4-31b", 11, 81920, 32.1e9)],
)
def test_gemma_4_has_its_published_size(
    shape: str, groups: int, full_bytes: int, parameters: float, tmp_path: Path
) -> None:
    """The embedding, which is the head, too, counts twice among parameters."""
    config = resolved(tmp_path, SHAPES[shape])
    assert config.kv_layout.groups.num_groups == groups
    assert Shape.of(config.model).kv_bytes == full_bytes
    assert full_bytes <= config.kv_layout.bytes_per_token <= 1.2 * full_bytes
    assert num_parameters(config.model, config.position) == pytest.approx(parameters, rel=0.005)
