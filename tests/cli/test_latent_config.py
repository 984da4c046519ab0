"""Configuration of models with latent attention: bytes per token, what nodes compare, ranks, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import SHAPES

from cli.explain import as_text, describe
from cli.plan.costs import Shape
from pdserve.config.attention_backends import Platform
from pdserve.config.compatibility import differences
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import choose_parallel_config, num_parameters
from pdserve.config.resolve import resolve
from pdserve.config.same_model import check_same_model
from pdserve.errors import CheckpointError, ConfigError
from pdserve.model.model_config import ModelConfig, load_model_config

H200 = DeviceInfo(kind="cuda", index=0, name="H200", memory=140 << 30)
GPU = Platform(device="cuda", has_triton=True, has_flashinfer=True)
V2_LITE = SHAPES["deepseek-v2-lite"]
V3 = SHAPES["deepseek-v3-5l-fp8"] | {"num_hidden_layers": 61}
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
}


def load(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return load_model_config(directory)


def resolved(directory: Path, config: dict[str, Any], **options: Any) -> NodeConfig:
    load(directory, config)
    return resolve(NodeOptions(model=str(directory), load_format="dummy", **options), H200, {}, GPU)


@pytest.mark.parametrize(
    ("config", "kv_bytes", "billions"),
    [(V2_LITE, 31_104, (15.7, 15.8)), (V3, 70_272, (670, 673)), (KIMI_K2, 70_272, (1020, 1030))],
    ids=["V2-Lite", "V3", "Kimi K2"],
)
def test_published_models_have_their_sizes(
    config: dict[str, Any], kv_bytes: int, billions: tuple[float, float], tmp_path: Path
) -> None:
    """Compare KV bytes per token in 16 bits, and the weights without layers that predict further tokens."""
    model = load(tmp_path, config)
    shape = Shape.of(model)
    assert shape.kv_bytes == kv_bytes
    assert str(shape).endswith(f"{model.num_layers} layers of {model.hidden_size}, latents of 576")
    least, most = billions
    assert least < num_parameters(model, choose_parallel_config(model, 1, 1).position(0)) / 1e9 < most


def test_explain_says_what_a_row_is(tmp_path: Path) -> None:
    config = resolved(tmp_path, V2_LITE)
    fields = describe(config)
    text = as_text(config)
    assert fields["bytes_per_token"] == 31_104
    assert fields["kv_layout"]["kind"] == "latent"
    page = config.kv_layout.kernel_block_size
    assert fields["kv_layout"]["shape"][1:] == [1, 27, 1, page, 576]
    assert "31104 bytes per token" in text
    assert f"[pages, 1, layers, 1, {page} tokens of a page, latent of 512 and rotated key of 64]" in text
    assert config.attention_backend == "flashinfer"


def test_a_simulated_node_has_the_rows_of_a_real_one(tmp_path: Path) -> None:
    load(tmp_path, V2_LITE)
    simulated = resolve(NodeOptions(model=str(tmp_path), engine="simulated"), H200, {}, GPU)
    assert simulated.kv_layout.bytes_per_token == 31_104
    assert simulated.compat_fields["kv_cache"] == "latent"


def test_every_tensor_shard_holds_all_rows_of_its_layers(tmp_path: Path) -> None:
    config = resolved(tmp_path, V2_LITE, pp=2, tp=2, stage_layers=(13, 14))
    ranks = [config.for_rank(rank, H200) for rank in range(4)]
    assert [(rank.share.first_layer, rank.kv_layout.shape[1:4]) for rank in ranks] == [
        (0, (1, 13, 1)),
        (0, (1, 13, 1)),
        (13, (1, 14, 1)),
        (13, (1, 14, 1)),
    ]
    assert sum(rank.kv_layout.bytes_per_token for rank in ranks) == 2 * 31_104


def test_nodes_with_other_rows_exchange_no_kv(tmp_path: Path) -> None:
    """The library's layers expand keys and values; a row with another order of rotated parts is another config."""
    native = resolved(tmp_path, V2_LITE)
    library = resolved(tmp_path, V2_LITE, model_impl="transformers")
    problems = differences(native.compat_fields, library.compat_fields)
    assert "kv_cache: latent here, full_attention there" in problems
    assert "model_impl: native here, transformers there" in problems
    other = resolved(tmp_path, V2_LITE | {"kv_lora_rank": 256})
    assert "head_dim: 576 here, 320 there" in differences(native.compat_fields, other.compat_fields)
    halves = resolved(tmp_path, V2_LITE | {"rope_interleave": False})
    assert halves.compat_fields["config"] != native.compat_fields["config"]


def test_weights_of_other_latents_are_not_reloaded(tmp_path: Path) -> None:
    config = resolved(tmp_path, V2_LITE)
    load(tmp_path, V2_LITE | {"v_head_dim": 64})
    with pytest.raises(CheckpointError, match=r"has latent\.v_head_dim 64, this node has 128; only weights"):
        check_same_model(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias = true; layers with latent attention have no biases"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63; rotary embeddings need an even one"),
        ({"topk_method": "noaux_tc"}, "topk_method.*'noaux_tc'.*greedy, group_limited_greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob = true"),
        (
            {"model_type": "kimi_k2"},
            "model_type = 'kimi_k2' beside architectures = .*whose model_type is 'deepseek_v2'",
        ),
    ],
)
def test_configs_that_describe_no_such_model_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path, V2_LITE | changes)


def test_tp_must_divide_the_query_heads(tmp_path: Path) -> None:
    model = load(tmp_path, V2_LITE)
    with pytest.raises(ConfigError, match="tp 3 does not divide the model's attention heads, 16"):
        choose_parallel_config(model, 1, 3)
    assert choose_parallel_config(model, 1, 16).tp == 16
