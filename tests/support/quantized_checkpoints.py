"""Quantized checkpoints as their tools write them, each with the float32 checkpoint of the same numbers.

plain = make_checkpoint(tmp_path / "plain", "qwen3")
quantized = quantize(plain, tmp_path / "fp8", "fp8 blocks")   # plain now has the dequantized numbers
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_GATED_DELTA = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", *_MLP, *_GATED_DELTA, *_LATENT)
GROUP = 16  # columns
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Stored = dict[str, Tensor]


class Format(NamedTuple):
    config: dict[str, Any]  # quantization_config
    quantize: Callable[[str, Tensor], tuple[Stored, Tensor]]  # (module, weight) → stored tensors, dequantized


def pack(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack [rows, columns] along the columns; field i of a word is its column ``order[i]``."""
    fields = 32 // bits
    rows, columns = values.shape
    words = torch.zeros(rows, -(-columns // fields), dtype=torch.int64)
    for column in range(columns):
        place = column % fields if order is None else order.index(column % fields)
        words[:, column // fields] += (values[:, column].long() % (1 << bits)) << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _grouped(weight: Tensor, group: int, low: int, high: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return values [out, in] in low … high, scales and zero points [out, groups]."""
    parts = weight.split(group, dim=1)
    top = torch.stack([part.amax(1) for part in parts], 1)
    bottom = torch.stack([part.amin(1) for part in parts], 1)
    if symmetric:
        scales = torch.maximum(top, -bottom) / high
        zeros = torch.zeros_like(scales)
    else:
        scales = (top - bottom) / (high - low)
        zeros = (low - bottom / scales).round().clamp(low, high)
    scales = scales.half().float()
    values = (weight / scales.repeat_interleave(group, 1)[:, : weight.shape[1]]).round()
    return (values + zeros.repeat_interleave(group, 1)[:, : weight.shape[1]]).clamp(low, high), scales, zeros


def _spread(values: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    size = values.shape[1]
    return (values - zeros.repeat_interleave(group, 1)[:, :size]) * scales.repeat_interleave(group, 1)[:, :size]


def fp8_blocks(block: int, scale_name: str) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        scales = torch.empty(-(-rows // block), -(-columns // block))
        values = torch.empty_like(weight).to(torch.float8_e4m3fn)
        dequantized = torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scales[i, j] = weight[place].abs().max() / 448
                values[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
                dequantized[place] = values[place].float() * scales[i, j]
        return {f"{name}.weight": values, f"{name}.{scale_name}": scales}, dequantized

    return quantize


def _fp8_rows(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {f"{name}.weight": values, f"{name}.weight_scale": scales}, values.float() * scales.float()


def _fp8_tensor(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    stored = {f"{name}.weight": values, f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(0.5)}
    return stored, values.float() * scale


def _int8_rows(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    values, scales, zeros = _grouped(weight, weight.shape[1], -128, 127, symmetric=False)
    stored = {"weight": values.to(torch.int8), "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return {f"{name}.{part}": tensor for part, tensor in stored.items()}, _spread(
        values, scales, zeros, weight.shape[1]
    )


def _packed(bits: int, symmetric: bool, group: int = GROUP) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        half = 1 << bits - 1
        size = group or weight.shape[1]
        values, scales, zeros = _grouped(weight, size, -half, half - 1, symmetric)
        narrow = symmetric or size > GROUP
        stored = {
            "weight_packed": pack(values + half, bits),
            "weight_scale": scales.bfloat16().half() if narrow else scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        scales = stored["weight_scale"].float()
        if not symmetric:
            stored["weight_zero_point"] = pack((zeros + half).t(), bits).t().contiguous()
        return {f"{name}.{part}": tensor for part, tensor in stored.items()}, _spread(values, scales, zeros, size)

    return quantize


def _packed_by_index(group: int = GROUP) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    """Activation order: columns are grouped by an index."""

    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        values, scales, zeros = _grouped(weight[:, order], group, -8, 7, symmetric=True)
        back = order.argsort()
        dequantized = _spread(values, scales, zeros, group)[:, back]
        stored = {
            "weight_packed": pack(values[:, back] + 8, 4),
            "weight_scale": scales if group == GROUP else scales.half(),
            "weight_g_idx": (back // group).int(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return {f"{name}.{part}": tensor for part, tensor in stored.items()}, dequantized

    return quantize


def _gptq(
    bits: int, *, desc_act: bool, symmetric: bool, offset: int, group: int = GROUP
) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        size = group or weight.shape[1]
        order = torch.arange(weight.shape[1])
        if desc_act:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(2))
        half = 1 << bits - 1
        values, scales, zeros = _grouped(weight[:, order], size, -half, half - 1, symmetric)
        back = order.argsort()
        dequantized = _spread(values, scales, zeros, size)[:, back]
        stored = {
            "qweight": pack(values[:, back] + half, bits).t().contiguous(),
            "qzeros": pack((zeros + half - offset).t(), bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": (back // size).int(),
        }
        return {f"{name}.{part}": tensor for part, tensor in stored.items()}, dequantized

    return quantize


def _awq(group: int = GROUP) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        size = group or weight.shape[1]
        values, scales, zeros = _grouped(weight, size, 0, 15, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's gemm
        stored = {
            "qweight": pack(values.t(), 4, order),
            "qzeros": pack(zeros.t(), 4, order),
            "scales": scales.t().half().contiguous(),
        }
        return {f"{name}.{part}": tensor for part, tensor in stored.items()}, _spread(values, scales, zeros, size)

    return quantize


def _e2m1(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs of codes [rows, columns / 2], the even columns in the low four bits, and the values."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    codes = (scaled[..., None] - table).abs().argmin(-1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), table[codes]


def nvfp4(compressed: bool) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    """ModelOpt stores the scale of the tensor, compressed-tensors its inverse."""

    def quantize(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        whole = weight.abs().max() / (6 * 448)
        scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        inverse = 1 / whole
        factor = 1 / inverse if compressed else whole
        spread = scales.float().repeat_interleave(16, 1)
        codes, values = _e2m1(torch.where(spread > 0, weight / (spread * factor), 0))
        dequantized = values * spread * factor
        if compressed:
            stored = {"packed": codes, "scale": scales, "global_scale": inverse.reshape(1)}
            stored = {f"{name}.weight_{part}": tensor for part, tensor in stored.items()}
            return {**stored, f"{name}.input_global_scale": torch.tensor([7.0])}, dequantized
        stored = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}
        return {f"{name}.{part}": tensor for part, tensor in stored.items()}, dequantized

    return quantize


def _mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    exponents = torch.frexp(weight.unflatten(1, (-1, 32)).abs().amax(2)).exponent - 3
    spread = torch.exp2(exponents.float()).repeat_interleave(32, 1)
    codes, values = _e2m1(weight / spread)
    stored = {f"{name}.weight_packed": codes, f"{name}.weight_scale": (exponents + 127).to(torch.uint8)}
    return stored, values * spread


def _auto_round(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """GPTQ's tensors, of which AutoRound writes no group index."""
    stored, dequantized = _gptq(4, desc_act=False, symmetric=True, offset=1)(name, weight)
    del stored[f"{name}.g_idx"]
    return stored, dequantized


def mxfp4_experts(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """gpt-oss: ``weight`` [experts, in, out]; blocks of 32 inputs share a power of two."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, blocks, 32]
    exponents = torch.frexp(blocks.abs().amax(-1)).exponent - 3  # the largest is below 2^3
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    scaled = blocks / torch.exp2(exponents.float())[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    dequantized = (table[codes] * torch.exp2(exponents.float())[..., None]).flatten(2).transpose(1, 2)
    stored = {
        f"{name}_blocks": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    return stored, dequantized


def _compressed(stored: str, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors, as llm-compressor writes it."""
    defaults = {"dynamic": False, "symmetric": True, "group_size": None, "block_structure": None, "actorder": None}
    group = {"targets": ["Linear"], "weights": {**defaults, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _gptq_config(bits: int, **options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **options}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_AUTO_ROUND = {
    "autoround_version": "0.5.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "group_size": GROUP,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
_GROUPS = {"strategy": "group", "group_size": GROUP, "type": "int"}
FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(
        {**_FP8, "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        fp8_blocks(128, "weight_scale_inv"),
    ),
    "fp8 tensor": Format({**_FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}, _fp8_tensor),
    "modelopt fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "ignore": ["lm_head"]},
        _fp8_tensor,
    ),
    "fbgemm rows": Format({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, _fp8_rows),
    "compressed fp8 rows": Format(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), _fp8_rows
    ),
    "compressed fp8 tensor": Format(
        _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), _fp8_tensor
    ),
    "compressed fp8 blocks": Format(
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 64]),
        fp8_blocks(64, "weight_scale"),
    ),
    "compressed int8": Format(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), _int8_rows
    ),
    "compressed w4a16": Format(_compressed("pack-quantized", num_bits=4, **_GROUPS), _packed(4, symmetric=True)),
    "compressed w4a16 zero points": Format(
        _compressed("pack-quantized", num_bits=4, **_GROUPS, symmetric=False), _packed(4, symmetric=False)
    ),
    "compressed w4a16 order": Format(
        _compressed("pack-quantized", num_bits=4, **_GROUPS, actorder="group"), _packed_by_index()
    ),
    "compressed w8a16": Format(_compressed("pack-quantized", num_bits=8, **_GROUPS), _packed(8, symmetric=True)),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq()
    ),
    "auto-round": Format(_AUTO_ROUND, _auto_round),
    "auto-round awq": Format({**_AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False}, _awq()),
    "gptq": Format(
        _gptq_config(4, desc_act=False, sym=True, checkpoint_format="gptq"),
        _gptq(4, desc_act=False, symmetric=True, offset=1),
    ),
    "gptq desc_act": Format(
        _gptq_config(4, desc_act=True, sym=True), _gptq(4, desc_act=True, symmetric=True, offset=1)
    ),
    "gptq zero points": Format(
        _gptq_config(4, desc_act=True, sym=False, checkpoint_format="gptq_v2"),
        _gptq(4, desc_act=True, symmetric=False, offset=0),
    ),
    "gptq 8 bits": Format(
        _gptq_config(8, desc_act=False, sym=False), _gptq(8, desc_act=False, symmetric=False, offset=1)
    ),
}


def _grouped_config(group: int) -> dict[str, Any]:
    return (
        {"strategy": "group", "group_size": group, "type": "int"} if group else {"strategy": "channel", "type": "int"}
    )


def _gptq_of(group: int, desc_act: bool, symmetric: bool, version: str) -> Format:
    options = {"desc_act": desc_act, "sym": symmetric, "checkpoint_format": version, "group_size": group or -1}
    offset = 1 if version == "gptq" else 0
    return Format(
        {**_gptq_config(4), **options},
        _gptq(4, desc_act=desc_act, symmetric=symmetric, offset=offset, group=group),
    )


_MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}
_MXFP4_GROUP = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
#: Formats that V2 keeps in 4 bits: the groups of those above are too small for it.
FOUR_BITS: dict[str, Format] = {
    "nvfp4": Format({**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, nvfp4(compressed=False)),
    "compressed nvfp4": Format(
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4(compressed=True),
    ),
    "compressed mxfp4": Format(_compressed("mxfp4-pack-quantized", **_MXFP4_GROUP), _mxfp4),
    **{
        f"awq {group}": Format(
            {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"},
            _awq(group),
        )
        for group in (32, 64, 0)
    },
    **{f"gptq {group}": _gptq_of(group, desc_act=False, symmetric=True, version="gptq") for group in (32, 64, 0)},
    "gptq order": _gptq_of(32, desc_act=True, symmetric=True, version="gptq"),
    "gptq zeros": _gptq_of(32, desc_act=False, symmetric=False, version="gptq"),
    "gptq zeros order": _gptq_of(64, desc_act=True, symmetric=False, version="gptq_v2"),
    **{
        f"w4a16 {group}": Format(
            _compressed("pack-quantized", num_bits=4, **_grouped_config(group)), _packed(4, symmetric=True, group=group)
        )
        for group in (32, 64, 0)
    },
    **{
        f"w4a16 zeros {group}": Format(
            _compressed("pack-quantized", num_bits=4, **_grouped_config(group), symmetric=False),
            _packed(4, symmetric=False, group=group),
        )
        for group in (32, 0)
    },
    "w4a16 order": Format(
        _compressed("pack-quantized", num_bits=4, **_grouped_config(32), actorder="group"), _packed_by_index(32)
    ),
    "auto-round 32": Format(
        {**_AUTO_ROUND, "group_size": 32}, _gptq(4, desc_act=False, symmetric=True, offset=1, group=32)
    ),
}


def quantize(plain: Path, quantized: Path, name: str) -> Path:
    """Write the quantized checkpoint of a float32 one, which gets the same numbers; return its directory."""
    shutil.copytree(plain, quantized)
    chosen = Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4_experts)
    chosen = {**FORMATS, **FOUR_BITS}.get(name, chosen)
    num_quantized = 0
    for file in plain.glob("*.safetensors"):
        stored: Stored = {}
        rounded: Stored = {}
        for key, tensor in load_file(file).items():
            module = key.removesuffix(".weight")
            rounded[key] = stored[key] = tensor
            is_experts = key.endswith(("gate_up_proj", "down_proj"))
            if is_experts if name == "mxfp4" else module.split(".")[-1] in LINEARS and module != key:
                del stored[key]
                parts, rounded[key] = chosen.quantize(module, tensor)
                stored.update(parts)
                num_quantized += 1
        save_file({key: tensor.contiguous() for key, tensor in rounded.items()}, file, {"format": "pt"})
        save_file({key: tensor.contiguous() for key, tensor in stored.items()}, quantized / file.name, {"format": "pt"})
    assert num_quantized, f"no weight of {plain} is quantized"
    for index in quantized.glob("*.index.json"):
        index.unlink()  # its tensors have other names
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": chosen.config}))
    return quantized
