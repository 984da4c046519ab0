"""Broken quantized checkpoints are refused before weights are read, and unknown formats by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config
from quantized_checkpoints import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

import runner
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import CheckpointError
from pdserve.model.model_config import load_model_config


def resolve_node(directory: Path, impl: str) -> None:
    options = NodeOptions(model=str(directory), device="cpu", kv_cache_memory=1 << 22, model_impl=impl)
    resolve(options, DeviceInfo(kind="cpu", index=0, name="cpu", memory=1 << 34), {})


Q = "model.layers.0.self_attn.q_proj"


def cut(name: str, size: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{Q}.{name}": tensors[f"{Q}.{name}"][:size]})


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{Q}.{name}")


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{Q}.{name}": tensor})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 blocks", drop("weight_scale_inv"), r"q_proj.weight' of F8_E4M3 lacks .*q_proj.weight_scale_inv"),
        (
            "fp8 blocks",
            put("weight_scale_inv", torch.ones(2, 1)),
            r"shape \(2, 1\) of F32; .*\(64, 64\) needs \(1, 1\)",
        ),
        ("fp8 blocks", put("weight_scale_inv", torch.ones(1, 1).int()), "of I32; .*of F32 or BF16 or F16 or F8_E8M0"),
        ("fp8 blocks", put("weight", torch.ones(64, 64)), "weight_scale_inv' is a part of no weight"),
        ("fp8 blocks", put("weight", torch.ones(64).to(torch.float8_e4m3fn)), r"shape \(64,\), which plain weights"),
        ("fp8 blocks", put("weight", torch.ones(64, 64).to(torch.float8_e5m2)), "is F8_E5M2, which"),
        ("fp8 tensor", put("weight_scale", torch.ones(3)), r"needs \(1, 1\) or \(1,\) or \(\)"),
        ("compressed int8", drop("weight_zero_point"), "lacks .*q_proj.weight_zero_point"),
        ("compressed w4a16", cut("weight_scale", 60), r"weight_scale' has shape \(60, 4\).*needs \(64, 4\)"),
        ("compressed w4a16 zero points", cut("weight_zero_point", 7), r"shape \(7, 4\).*needs \(8, 4\)"),
        ("compressed w4a16 order", drop("weight_g_idx"), "lacks .*q_proj.weight_g_idx"),
        ("awq", cut("scales", 3), r"scales' has shape \(3, 64\).*needs \(4, 64\)"),
        ("awq", drop("qzeros"), "lacks .*q_proj.qzeros"),
        ("gptq desc_act", drop("g_idx"), "lacks .*q_proj.g_idx"),
        ("gptq", cut("g_idx", 60), r"g_idx' has shape \(60,\).*needs \(64,\)"),
        ("gptq", put("weight", torch.ones(64, 64)), "stored twice, plain and quantized"),
        ("nvfp4", drop("weight_scale_2"), "q_proj.weight' of U8 lacks .*q_proj.weight_scale_2"),
        ("nvfp4", drop("weight_scale"), "q_proj.weight' of U8 lacks .*q_proj.weight_scale'"),
        ("nvfp4", put("weight_scale", torch.ones(64, 4)), "of F32; .* of F8_E4M3"),
        ("nvfp4", put("weight_scale_2", torch.ones(2)), r"shape \(2,\) of F32; .* needs \(\) or \(1,\) of F32"),
        ("nvfp4", put("weight", torch.ones(64, 20).to(torch.uint8)), "has 40 inputs, which are no whole groups of 16"),
        (
            "nvfp4",
            put("weight", torch.ones(64, 64)),
            "q_proj.weight_scale' is F8_E4M3, which its quantization_config does not describe",
        ),
        ("compressed nvfp4", drop("weight_global_scale"), "lacks .*q_proj.weight_global_scale"),
    ],
)
def test_broken_parts_are_refused_before_a_start(
    name: str, change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", name)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, quantized / "model.safetensors")
    for impl in ("native", "transformers"):
        with pytest.raises(CheckpointError, match=message):
            resolve_node(quantized, impl)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("gptq desc_act", "g_idx", torch.full((64,), 9, dtype=torch.int32), "g_idx names groups beyond the 4"),
        ("compressed w4a16", "weight_shape", torch.tensor([64, 63]), r"weight_shape is \[64, 63\], but the values"),
    ],
)
def test_broken_values_are_refused(name: str, part: str, value: Tensor, message: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", name)
    tensors = load_file(quantized / "model.safetensors")
    save_file({**tensors, f"{Q}.{part}": value}, quantized / "model.safetensors")
    for impl in ("native", "transformers"):
        with pytest.raises(CheckpointError, match=message):
            runner.build(node_config(quantized, impl=impl), lambda stage, fraction: None)


def group(stored: str, **weights: Any) -> dict[str, Any]:
    return {"format": stored, "config_groups": {"group_0": {"weights": weights}}}


COMPRESSED = "compressed-tensors"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("bitsandbytes", {"load_in_4bit": True}, "quantized checkpoint .'bitsandbytes'.; supported are float32"),
        (
            "modelopt",
            {"quant_algo": "W4A8_NVFP4_FP8"},
            "ModelOpt quantized .'W4A8_NVFP4_FP8'., which are not supported; supported of ModelOpt are FP8,",
        ),
        ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2'; supported are e4m3"),
        ("fp8", {"expert_dtype": "fp4"}, "expert_dtype 'fp4'; supported are fp8"),
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size \[128\]; it must be two numbers"),
        ("fp8", {"weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
        ("awq", {"version": "gemv"}, "version 'gemv'; supported are gemm"),
        ("awq", {"bits": 8}, "bits 8; supported are 4"),
        ("awq", {"zero_point": False}, "zero_point False; supported are True"),
        ("gptq", {"bits": 3, "group_size": 128}, "bits 3; supported are 4, 8"),
        ("gptq", {"bits": 4, "group_size": 0}, "group_size 0; it must be -1 or a number"),
        ("gptq", {"bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 3}}}, "bits 3; supported are 4, 8"),
        ("gptq", {"bits": 4, "group_size": 128, "dynamic": ["+:.*"]}, "dynamic .*; it must be an object"),
        (
            "auto-round",
            {"bits": 4, "packing_format": "auto_round:mx_fp4"},
            "packing_format 'auto_round:mx_fp4'; supported",
        ),
        ("auto-round", {"bits": 2, "group_size": 128}, "bits 2; supported are 4, 8"),
        ("auto-round", {"bits": 4, "group_size": 128, "data_type": "fp8"}, "data_type 'fp8'; supported are int"),
        ("auto-round", {"bits": 4, "group_size": 128, "act_bits": 8}, "act_bits 8; supported are"),
        (
            "auto-round",
            {"bits": 4, "group_size": 128, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 3}}},
            "bits 3; supported are 4, 8",
        ),
        (None, {"bits": 4, "group_size": 64}, "Apple's MLX format .4 bits."),
        (None, {"ignore": []}, "a quantization_config without quant_method; supported are"),
        (None, {"quant_algo": "W4A8_AWQ"}, "ModelOpt quantized .'W4A8_AWQ'., which are not supported"),
        (COMPRESSED, {"config_groups": []}, r"config_groups \[\]; it must be an object"),
        ("modelopt", {"quant_algo": "NVFP4", "group_size": 32}, "group_size 32; supported are 16"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, "quantized_layers None; it must name the algorithm of each"),
        (
            "modelopt",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "MXFP8"}}},
            "quant_algo 'mxfp8'; supported are fp8, fp8_per_channel_per_token, nvfp4, w4a16_nvfp4",
        ),
        (COMPRESSED, group("nvfp4-pack-quantized", num_bits=4, type="int"), "type 'int'; supported are float"),
        (COMPRESSED, group("mxfp4-pack-quantized", type="float", group_size=16), "group_size 16; supported are 32"),
        (
            COMPRESSED,
            {"format": "pack-quantized", "config_groups": {str(n): {"weights": {"num_bits": n}} for n in (4, 8)}},
            "pack-quantized groups of different num_bits whose shapes are equal",
        ),
        (COMPRESSED, group("marlin-24", num_bits=4), "format 'marlin-24'; supported are float-quantized"),
        (COMPRESSED, group("pack-quantized", num_bits=3), "num_bits 3; supported are 4, 8"),
        (COMPRESSED, group("float-quantized", num_bits=4, type="float"), "num_bits 4; supported are 8"),
        (COMPRESSED, group("pack-quantized", type="float"), "weights of type 'float' in the format pack-quantized"),
        (COMPRESSED, group("int-quantized", strategy="token"), "strategy 'token'; supported are tensor, channel"),
        (COMPRESSED, {"config_groups": {"g": {}}, "transform_config": {"a": 1}}, "a transform_config"),
        (
            COMPRESSED,
            {"config_groups": {"g": {}}, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config .*sparse-24-bitmask.*supported are dense weights",
        ),
    ],
)
def test_unknown_formats_and_variants_are_refused_by_name(
    method: str | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **options}
    (plain / "config.json").write_text(json.dumps(config))
    for impl in ("native", "transformers"):
        with pytest.raises(CheckpointError, match=message) as refused:
            load_model_config(plain, impl)
        assert "Choose a checkpoint" in str(refused.value)


@pytest.mark.parametrize("unset", [{"format": None}, {}])
def test_a_group_without_a_format_has_that_of_the_checkpoint(unset: dict[str, Any], tmp_path: Path) -> None:
    """Newer versions of compressed-tensors write a null."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    options = {"quant_method": COMPRESSED, "format": "float-quantized", "sparsity_config": {"format": None}}
    options["config_groups"] = {"group_0": {**unset, "weights": weights, "targets": ["Linear"]}}
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    assert load_model_config(plain).weight_format == COMPRESSED


def test_fp8_weights_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", "fp8 tensor")
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    for impl in ("native", "transformers"):
        with pytest.raises(CheckpointError, match="is F8_E4M3, which its quantization_config does not describe"):
            resolve_node(quantized, impl)
