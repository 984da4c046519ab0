"""Find the stored tensors that make up each weight, by names, dtypes and shapes; no tensor is read.

    weight[row, column] = (value[row, column] - zero point) * scale

A scale belongs to a block of rows (outputs) and columns (inputs). A stored tensor says whether a module is quantized,
so modules that config.json leaves out (``modules_to_not_convert``, ``ignore``) need no list here.

| packing | values                                           | scales; zero points; group index               |
|---------|--------------------------------------------------|------------------------------------------------|
| PLAIN   | X [..., out, in] FP8 or int8                     | X_scale_inv or X_scale; X_zero_point           |
| PACKED  | X_packed [out, in * bits / 32]                   | X_scale; X_zero_point, packed by rows; X_g_idx |
| GPTQ    | X.qweight [in * bits / 32, out]                  | X.scales [groups, out]; X.qzeros; X.g_idx      |
| AWQ     | X.qweight [in, out * bits / 32], columns shuffled | X.scales [groups, out]; X.qzeros               |
| MXFP4   | X_blocks [experts, out, in / 32, 16]             | X_scales [experts, out, in / 32], exponents    |
| FP4     | X [out, in / 2], two E2M1 values a byte          | X_scale; X_scale_2, a factor of the tensor     |
| FP4_PACKED | X_packed [out, in / 2]                        | X_scale; X_global_scale, a divisor             |

Sources: transformers (integrations/finegrained_fp8.py, mxfp4.py), compressed-tensors, AutoAWQ, GPTQModel, ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdserve.checkpoint.kv_scales import is_kv_scale
from pdserve.checkpoint.safetensors_header import Tensor
from pdserve.errors import CheckpointError, shown
from pdserve.kv.layout import DTYPE_BYTES

PLAIN = "plain"
PACKED = "packed"
GPTQ = "gptq"
AWQ = "awq"
MXFP4 = "mxfp4"
FP4 = "fp4"  # NVFP4 of ModelOpt
FP4_PACKED = "fp4 packed"  # NVFP4 and MXFP4 of compressed-tensors

_WORD = 32  # bits of a packed int32
_MX_BLOCK = 32  # values that share an exponent


class StorageRule(msgspec.Struct, frozen=True, kw_only=True):
    """The storage of a weight in a format, read from its config."""

    packing: str
    dtype: str  # dtype of the stored values
    bits: int
    block: tuple[int, int]  # rows and columns that share a scale; 0: all of them
    has_zero_points: bool = False  # zero points are required; stored ones are always used
    has_group_index: bool = False  # group index is required
    zero_point_offset: str = ""  # GPTQ version 1 stores zero points less 1: in each "field", or by each "word"
    scale_dtypes: tuple[str, ...] = ("F32", "BF16", "F16", "F8_E8M0")
    has_global_scale: bool = False  # a scale of the whole tensor beside those of its blocks


class QuantizedWeight(msgspec.Struct, frozen=True, kw_only=True):
    """A weight and the names of the stored tensors that make it up."""

    shape: tuple[int, ...]  # shape in an unquantized checkpoint
    rule: StorageRule
    block: tuple[int, int]  # rows and columns that share a scale
    grid: tuple[int, int]  # scales of a matrix by rows and columns
    values: str
    scales: str
    zero_points: str | None
    group_index: str | None  # tensor with the group of each column; None: consecutive groups
    stored_shape: str | None
    global_scale: str | None = None
    scale_dtype: str = ""  # dtype of the stored scales
    stored_bytes: int = 0  # bytes of all parts

    @property
    def parts(self) -> tuple[str, ...]:
        names = (
            self.values,
            self.scales,
            self.zero_points,
            self.group_index,
            self.stored_shape,
            self.global_scale,
        )
        return tuple(name for name in names if name is not None)


class CheckpointWeights(NamedTuple):
    quantized: dict[str, QuantizedWeight]
    plain: dict[str, Tensor]  # tensors that are loaded unchanged
    stored_bytes: int

    @property
    def num_weights(self) -> int:
        shapes = [tensor.shape for tensor in self.plain.values()] + [weight.shape for weight in self.quantized.values()]
        return sum(map(prod, shapes))

    def memory_cost(self, weight_format: str, dtype: str, kept: bool = False) -> str:
        """Say what the weights take in memory, on all ranks together; ``kept``: linear layers as they are stored."""
        if kept:
            return f"{weight_format}, kept as stored: {self.stored_bytes / 2**30:.2f} GiB"
        in_memory = self.num_weights * DTYPE_BYTES[dtype]
        return (
            f"{weight_format}, dequantized when loaded: {self.stored_bytes / 2**30:.2f} GiB stored take "
            f"{in_memory / 2**30:.2f} GiB of memory in {dtype}"
        )


class _Names(NamedTuple):
    """Suffixes behind the common stem of a weight's tensors."""

    values: str
    weight: str
    scales: tuple[str, ...]
    zero_points: str = ""
    group_index: str = ""
    shape: str = ""
    global_scale: str = ""


_NAMES = {
    PLAIN: _Names("", "", ("_scale_inv", "_scale"), "_zero_point"),
    PACKED: _Names("_packed", "", ("_scale",), "_zero_point", "_g_idx", "_shape"),
    GPTQ: _Names(".qweight", ".weight", (".scales",), ".qzeros", ".g_idx"),
    AWQ: _Names(".qweight", ".weight", (".scales",), ".qzeros"),
    MXFP4: _Names("_blocks", "", ("_scales",)),
    FP4: _Names("", "", ("_scale",), global_scale="_scale_2"),
    FP4_PACKED: _Names("_packed", "", ("_scale",), global_scale="_global_scale"),
}
#: Scales of activations, which are not quantized here, and of KV caches, which kv_scales.py reads.
_UNUSED = tuple(
    f"{kind}{what}"
    for kind in (".input", ".output", ".activation", "_activation", ".k", ".v", ".q", ".kv")
    for what in ("_scale", "_zero_point", "_scale_ub", "_global_scale")
)
_PARTS = (
    *(f".weight_{part}" for part in ("scale", "scale_inv", "scale_2", "global_scale", "packed", "g_idx")),
    *(".qweight", ".qzeros", ".scales"),
)
_NO_VALUES = ("_zero_point", "_scale", "_scale_inv", "_scale_2", "_global_scale")


def find_weights(
    model_dir: Path, headers: Mapping[Path, Mapping[str, Tensor]], rules: Sequence[StorageRule]
) -> CheckpointWeights:
    """Find the weights in the headers of a checkpoint's files; ``rules`` is empty for an unquantized one.

    Raises CheckpointError that names the tensor: without its scale, of a wrong shape or dtype, or of no known format.
    """
    tensors = {name: tensor for file in headers.values() for name, tensor in file.items()}
    try:
        quantized = _find(tensors, rules)
        used = {part for weight in quantized.values() for part in weight.parts}
        plain = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in used and not is_kv_scale(name) and not (rules and name.endswith(_UNUSED))
        }
        _check_rest(plain, quantized, rules)
    except _Mismatch as exc:
        raise CheckpointError(f"{model_dir}: {exc}; download the checkpoint again or choose another") from exc
    return CheckpointWeights(quantized, plain, sum(tensor.end - tensor.begin for tensor in tensors.values()))


class _Mismatch(Exception):
    """A tensor contradicts the format."""


def _find(tensors: Mapping[str, Tensor], rules: Sequence[StorageRule]) -> dict[str, QuantizedWeight]:
    weights: dict[str, QuantizedWeight] = {}
    for name, tensor in tensors.items():
        fitting = [rule for rule in rules if _holds_values(name, tensor, rule)]
        errors: list[_Mismatch] = []
        for rule in fitting:
            try:
                stem = name.removesuffix(_NAMES[rule.packing].values)
                weights[stem + _NAMES[rule.packing].weight] = _weight(tensors, name, stem, rule)
                break
            except _Mismatch as exc:
                errors.append(exc)
        else:
            if errors:
                raise errors[0]
    return weights


def _holds_values(name: str, tensor: Tensor, rule: StorageRule) -> bool:
    suffix = _NAMES[rule.packing].values
    return name.endswith(suffix) and tensor.dtype == rule.dtype and not name.endswith(_NO_VALUES)


def _weight(tensors: Mapping[str, Tensor], name: str, stem: str, rule: StorageRule) -> QuantizedWeight:
    names = _NAMES[rule.packing]
    shape = _shape(name, tensors[name].shape, rule)
    rows, columns = (shape[-1], shape[-2]) if rule.packing == MXFP4 else shape[-2:]
    block = rule.block[0] or max(rows, 1), rule.block[1] or max(columns, 1)
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales = next((stem + suffix for suffix in names.scales if stem + suffix in tensors), stem + names.scales[0])
    if rule.packing in (FP4, FP4_PACKED) and columns % block[1]:
        raise _Mismatch(f"tensor {shown(name)} has {columns} inputs, which are no whole groups of {block[1]}")
    _check(tensors, name, scales, rule.scale_dtypes, _scale_shapes(shape, grid, rule))
    zeros = _optional(tensors, name, stem, names.zero_points, rule.has_zero_points)
    if zeros is not None:
        _check(tensors, name, zeros, *_zero_points(tensors[zeros], shape, grid, rule))
    group_index = _optional(tensors, name, stem, names.group_index, rule.has_group_index)
    if group_index is not None:
        _check(tensors, name, group_index, ("I32", "I64"), [(columns,)])
    stored_shape = _optional(tensors, name, stem, names.shape, needed=False)
    global_scale = None
    if rule.has_global_scale:
        global_scale = stem + names.global_scale
        _check(tensors, name, global_scale, ("F32",), [(), (1,)])
    weight = QuantizedWeight(
        shape=shape,
        rule=rule,
        block=block,
        grid=grid,
        values=name,
        scales=scales,
        zero_points=zeros,
        group_index=group_index,
        stored_shape=stored_shape,
        global_scale=global_scale,
        scale_dtype=tensors[scales].dtype,
    )
    return msgspec.structs.replace(
        weight, stored_bytes=sum(tensors[part].end - tensors[part].begin for part in weight.parts)
    )


def _shape(name: str, stored: tuple[int, ...], rule: StorageRule) -> tuple[int, ...]:
    """Return the shape of the weight that values of a stored shape hold."""
    per_word = _WORD // rule.bits
    if rule.packing == PLAIN and len(stored) in (2, 3):
        return stored
    if rule.packing == MXFP4 and len(stored) == 4 and stored[3] * 2 == _MX_BLOCK:
        experts, rows, groups, _ = stored
        return experts, groups * _MX_BLOCK, rows
    if rule.packing == GPTQ and len(stored) == 2:
        return stored[1], stored[0] * per_word
    if rule.packing == AWQ and len(stored) == 2:
        return stored[1] * per_word, stored[0]
    if rule.packing == PACKED and len(stored) == 2:
        return stored[0], stored[1] * per_word
    if rule.packing in (FP4, FP4_PACKED) and len(stored) == 2:
        return stored[0], stored[1] * 2
    raise _Mismatch(f"tensor {shown(name)} has shape {shown(stored)}, which {rule.packing} weights never have")


def _scale_shapes(shape: tuple[int, ...], grid: tuple[int, int], rule: StorageRule) -> list[tuple[int, ...]]:
    """Return the shapes that scales may have."""
    if rule.packing in (GPTQ, AWQ):
        return [(grid[1], grid[0])]
    shapes = [(*shape[:-2], *grid)]
    if grid[1] == 1 and rule.packing not in (MXFP4, FP4, FP4_PACKED):
        shapes.append((*shape[:-2], grid[0]))
    if grid == (1, 1):
        shapes.append(shape[:-2])
    return shapes


def _zero_points(
    stored: Tensor, shape: tuple[int, ...], grid: tuple[int, int], rule: StorageRule
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Return the dtypes and shapes that zero points may have."""
    per_word = _WORD // rule.bits
    if rule.packing in (GPTQ, AWQ):
        return ("I32",), [(grid[1], -(-grid[0] // per_word))]
    if stored.dtype == "I32" and rule.packing == PACKED:
        return ("I32",), [(-(-grid[0] // per_word), grid[1])]
    return ("I8", rule.dtype), _scale_shapes(shape, grid, rule)


def _optional(tensors: Mapping[str, Tensor], name: str, stem: str, suffix: str, needed: bool) -> str | None:
    if suffix and stem + suffix in tensors:
        return stem + suffix
    if needed:
        raise _Mismatch(f"tensor {shown(name)} lacks {shown(stem + suffix)}")
    return None


def _check(
    tensors: Mapping[str, Tensor], name: str, part: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise _Mismatch unless ``part`` has one of the dtypes and shapes that the values in ``name`` need."""
    if part not in tensors:
        raise _Mismatch(f"tensor {shown(name)} of {tensors[name].dtype} lacks {shown(part)}")
    tensor = tensors[part]
    if tensor.dtype not in dtypes or tensor.shape not in shapes:
        raise _Mismatch(
            f"tensor {shown(part)} has shape {shown(tensor.shape)} of {tensor.dtype}; {shown(name)} of shape "
            f"{shown(tensors[name].shape)} needs {' or '.join(map(str, shapes))} of {' or '.join(dtypes)}"
        )


def _check_rest(
    plain: Mapping[str, Tensor], quantized: Mapping[str, QuantizedWeight], rules: Sequence[StorageRule]
) -> None:
    """Raise _Mismatch for quantized values that no rule covers, and for parts of no quantized weight."""
    for name, tensor in plain.items():
        if tensor.dtype.startswith(("F8", "F6", "F4")):
            raise _Mismatch(f"tensor {shown(name)} is {tensor.dtype}, which its quantization_config does not describe")
    for name in plain:
        if rules and name.endswith(_PARTS):
            raise _Mismatch(f"tensor {shown(name)} is a part of no weight that its quantization_config describes")
        if name in quantized:
            raise _Mismatch(f"tensor {shown(name)} is stored twice, plain and quantized")
