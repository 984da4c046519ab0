"""The FP8 KV cache of runners: scales of a checkpoint, stored values, and tokens that do not depend on chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tensors, make_checkpoint, node_config
from stepper import Stepper
from torch import Tensor

import runner
from pdserve.config.attention_backends import Platform
from pdserve.config.compatibility import differences
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import CheckpointError, ConfigError
from pdserve.kv.layout import UNSCALED, KVScales
from pdserve.weights.change import WeightChange
from runner.base import BaseModelRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs V2's kernels
LAYERS = 2
NO_TENSORS: Mapping[str, Tensor] = {}
SCALES = (KVScales(0.03125, 0.0625), KVScales(0.02, 0.07))
PROMPT = [(7 * index) % 120 + 3 for index in range(45)]
SELF_ATTN = "model.layers.{}.self_attn"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=LAYERS)


def with_scales(
    path: Path, k: str, v: str, dtype: torch.dtype = torch.float32, overrides: Mapping[str, Tensor] = NO_TENSORS
) -> Path:
    """Write a checkpoint that has scales by these names behind the prefix of the layer's attention."""
    made = make_checkpoint(path, "qwen3", num_hidden_layers=LAYERS)
    tensors = {}
    for layer, scales in enumerate(SCALES):
        tensors[f"{SELF_ATTN.format(layer)}.{k}"] = torch.tensor(scales.k, dtype=dtype)
        tensors[f"{SELF_ATTN.format(layer)}.{v}"] = torch.tensor([scales.v], dtype=dtype)
    add_tensors(made, {**tensors, **overrides})
    return made


def resolved(directory: Path, kv_cache_dtype: str = "fp8_e4m3", **options: Any) -> NodeConfig:
    asked = NodeOptions(
        model=str(directory), device="cpu", kv_cache_memory=1 << 22, kv_cache_dtype=kv_cache_dtype, **options
    )
    return resolve(asked, DeviceInfo(kind="cpu", index=0, name="cpu", memory=1 << 34), {})


def tokens(config: NodeConfig, chunk: int = 1 << 30) -> list[int]:
    built = runner.build(config, lambda stage, fraction: None)
    try:
        return Stepper(built).generate([PROMPT], 6, chunk=chunk)[0].output
    finally:
        built.close()


# ---------------------------------------------------------------- scales of a checkpoint


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_are_read_by_every_name(k: str, v: str, tmp_path: Path) -> None:
    config = resolved(with_scales(tmp_path, k, v))
    for scales, expected in zip(config.kv_scales, SCALES, strict=True):
        assert (scales.k, scales.v) == pytest.approx((expected.k, expected.v), rel=1e-6)
    assert any(choice.startswith("kv_scales=k 0.02 … 0.03125, v 0.0625 … 0.07 in 2") for choice in config.choices)
    assert resolved(tmp_path, "auto").kv_scales == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    scales = resolved(with_scales(tmp_path, "k_scale", "v_scale", dtype)).kv_scales
    assert [layer.k for layer in scales] == [torch.tensor(layer.k, dtype=dtype).item() for layer in SCALES]


def test_without_scales_they_are_one(checkpoint: Path) -> None:
    assert resolved(checkpoint, "fp8").kv_scales == (UNSCALED,) * LAYERS


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.tensor(0.0), "is 0; a scale is above 0"),
        (torch.tensor(float("nan")), "is nan; a scale is above 0"),
        (torch.ones(2), r"has shape \(2,\) of F32; an FP8 KV cache has one"),
        (torch.tensor(1), r"has shape \(\) of I64"),
    ],
)
def test_impossible_scales_are_refused(tensor: Tensor, error: str, tmp_path: Path) -> None:
    name = f"{SELF_ATTN.format(1)}.k_scale"
    with pytest.raises(CheckpointError, match=error):
        resolved(with_scales(tmp_path, "k_scale", "v_scale", overrides={name: tensor}))


def test_a_layer_without_its_scale_is_refused(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=LAYERS)
    add_tensors(made, {f"{SELF_ATTN.format(0)}.kv_scale": torch.tensor(0.5)})
    with pytest.raises(CheckpointError, match="no k_scale of layer 1"):
        resolved(made)


def test_another_scheme_of_compressed_tensors_is_refused(tmp_path: Path) -> None:
    made = with_scales(tmp_path, "k_scale", "v_scale")
    path = made / "config.json"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantized = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))
    assert resolved(made).kv_scales[0] == SCALES[0]
    scheme["strategy"] = "attn_head"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))
    with pytest.raises(ConfigError, match=r"kv_cache_scheme is .*attn_head"):
        resolved(made)
    assert resolved(made, "auto").kv_scales == ()


# ---------------------------------------------------------------- the configuration


def test_an_fp8_cache_takes_a_quarter_of_float32(checkpoint: Path) -> None:
    plain = resolved(checkpoint, "auto")
    quantized = resolved(checkpoint)
    assert (plain.dtype, quantized.dtype) == ("float32", "float32")
    assert quantized.kv_layout.bytes_per_token * 4 == plain.kv_layout.bytes_per_token
    assert quantized.kv_layout.num_blocks == plain.kv_layout.num_blocks * 4


def test_a_stage_has_the_scales_of_its_layers(checkpoint: Path) -> None:
    config = node_config(checkpoint, pp=LAYERS, kv_scales=SCALES)
    assert [config.for_rank(rank, config.device).rank_kv_scales for rank in range(LAYERS)] == [SCALES[:1], SCALES[1:]]


def test_peers_of_unlike_dtypes_or_scales_differ_by_name(checkpoint: Path, tmp_path: Path) -> None:
    plain, ones, scaled = (
        config.compat_fields
        for config in (
            resolved(checkpoint, "auto"),
            resolved(checkpoint),
            resolved(with_scales(tmp_path, "k_scale", "v_scale")),
        )
    )
    assert differences(plain, ones) == "kv_dtype: float32 here, fp8_e4m3 there; kv_scales: none here, 1.0 there"
    assert "kv_scales: 1.0 here, k 0.02 … 0.03125, v 0.0625 … 0.07 in 2 layers" in differences(ones, scaled)


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), (None, False)])
def test_gpus_without_fp8_are_refused(capability: tuple[int, int] | None, refused: bool, checkpoint: Path) -> None:
    gpu = DeviceInfo(kind="cuda", index=0, name="a GPU", memory=80 << 30, capability=capability)
    options = NodeOptions(model=str(checkpoint), kv_cache_dtype="fp8")
    bare = Platform(device="cuda", has_triton=False, has_flashinfer=False)
    if refused:
        with pytest.raises(ConfigError, match=r"a GPU has compute capability 8.0, FP8 needs 8.9"):
            resolve(options, gpu, {}, bare)
    else:
        assert resolve(options, gpu, {}, bare).kv_layout.dtype == "fp8_e4m3"


def test_latents_in_fp8_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "deepseek_v3")
    problem = "kv_cache_dtype fp8: DeepseekV3ForCausalLM keeps KV of the kind latent,"
    with pytest.raises(ConfigError, match=rf"{problem}.*use auto"):
        resolved(directory, "fp8")
    layout = resolved(directory, "auto").kv_layout
    assert (layout.spec.kind, layout.num_kv_heads, layout.head_dim) == ("latent", 1, 48)
    assert layout.block_bytes == layout.block_size * 3 * 48 * 4  # 3 layers in float32


# ---------------------------------------------------------------- runners

RUNNERS = [
    pytest.param({"attention_backend": "torch"}, id="V1"),
    pytest.param({"runner": "V2", "attention_backend": "triton", "device": DEVICE}, id="V2", marks=pytest.mark.slow),
    pytest.param({"impl": "transformers"}, id="transformers"),
]


def stored(config: NodeConfig) -> Tensor:
    """Return the KV of the prompt in float32, [pages, heads, layers, 2, page, head_dim]."""
    built = runner.build(config, lambda stage, fraction: None)
    assert isinstance(built, BaseModelRunner)
    try:
        Stepper(built).generate([PROMPT], 1)
        return built._cache.tensor.float().cpu()
    finally:
        built.close()


@pytest.mark.parametrize("options", RUNNERS)
def test_the_cache_holds_keys_and_values_quantized_by_layer(options: dict[str, Any], checkpoint: Path) -> None:
    """The first layer sees no quantized KV. Values above 448 times their scale saturate."""
    expected = stored(node_config(checkpoint, **options, num_blocks=8))[:, :, 0]
    quantized = stored(node_config(checkpoint, **options, num_blocks=8, kv_scales=SCALES))
    factors = torch.tensor([[scales.k, scales.v] for scales in SCALES])[:, :, None, None]
    torch.testing.assert_close((quantized * factors)[:, :, 0], expected, rtol=1 / 15, atol=1e-4)
    assert quantized[:, :, 1].count_nonzero() > 0.9 * expected.count_nonzero()


@pytest.mark.parametrize("options", RUNNERS)
def test_tokens_do_not_depend_on_chunks(options: dict[str, Any], checkpoint: Path) -> None:
    config = node_config(checkpoint, **options, kv_scales=SCALES)
    assert tokens(config, chunk=16) == tokens(config)


def test_scales_in_a_checkpoint_are_not_taken_for_weights(checkpoint: Path, tmp_path: Path) -> None:
    scaled = with_scales(tmp_path, "k_scale", "v_scale")
    for impl in ("native", "transformers"):
        assert tokens(node_config(scaled, impl=impl)) == tokens(node_config(checkpoint, impl=impl))


def test_a_reload_with_other_scales_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = with_scales(tmp_path, "k_scale", "v_scale")
    built = runner.build(node_config(checkpoint, kv_scales=(UNSCALED,) * LAYERS), lambda stage, fraction: None)
    built.change_weights(WeightChange(str(checkpoint)))
    with pytest.raises(CheckpointError, match="other scales of the FP8 KV cache"):
        built.change_weights(WeightChange(str(other)))
    built.close()
