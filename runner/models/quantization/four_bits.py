"""Linear layers whose weights stay in 4 bits in memory: E2M1 or integers, with a scale per group of inputs.

file ──four_bit_slices──► codes, scales, zeros of a layer ──pack──► FourBitWeight, at a fixed address
                          memory only while it is filled
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdserve.model.quantization.layer_form import LayerForm
from runner.kernels.four_bits.stack import FourBitForm
from runner.kernels.four_bits.weights import FourBitWeight
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.models.quantization import LayerOptions, LinearMethod
from runner.models.quantization.four_bit_slices import NAMES
from runner.placement import TensorPlacement

_SCALE_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}

#: Codes, scales, zeros and output scales.
FilledTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def kernel_form(form: LayerForm, inputs: int) -> FourBitForm:
    """Return the form of a weight with ``inputs`` on this rank, as the kernels describe it."""
    assert form.kind in ("e2m1", "int4")
    return FourBitForm(form.kind, form.group or inputs, form.has_zeros, _SCALE_DTYPES[form.scale_dtype])


class FilledWeight:
    """Memory of a weight [outputs, inputs] as ``four_bit_slices`` has it; on the device meta until it is filled."""

    def __init__(self, outputs: int, inputs: int, form: LayerForm, device: torch.device) -> None:
        self._form = form
        self._device = device
        self._group = form.group or inputs  # inputs that share a scale
        groups = inputs // self._group
        meta: dict[str, Any] = {"device": "meta"}
        self.codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, **meta)
        self.scales = torch.empty(outputs, groups, dtype=_SCALE_DTYPES[form.scale_dtype], **meta)
        self.zeros = torch.empty(outputs, groups, dtype=torch.uint8, **meta) if form.has_zeros else None
        self.output_scales = torch.empty(outputs, dtype=torch.float32, **meta) if form.has_output_scales else None

    def shards(
        self, name: str, first: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None, restore: Any
    ) -> WeightShards:
        """Yield the tensors of one projection, whose memory begins at row ``first``."""
        mine = slice(first, first + outputs.size)
        dim, start = (0, outputs.start) if inputs.size == inputs.full_size else (1, inputs.start)
        where: dict[str, Any] = {"rows": rows, "restore": restore}
        full = outputs.full_size, inputs.full_size // 2
        yield name, WeightShard(self.codes[mine], full, dim, start // 2 if dim else start, **where)
        groups = inputs.full_size // self._group if self._form.group else 1
        dim, start = (1, start // self._group) if dim and self._form.group else (0, outputs.start)
        full = outputs.full_size, groups
        yield name + NAMES.scales, WeightShard(self.scales[mine], full, dim, start, **where)
        if self.zeros is not None:
            yield name + NAMES.zeros, WeightShard(self.zeros[mine], full, dim, start, **where)
        if self.output_scales is not None:
            scales = self.output_scales[mine]
            yield name + NAMES.output_scales, WeightShard(scales, (outputs.full_size,), 0, outputs.start, **where)

    @property
    def is_empty(self) -> bool:
        return self.codes.is_meta

    @property
    def tensors(self) -> FilledTensors:
        return self.codes, self.scales, self.zeros, self.output_scales

    def allocate(self) -> None:
        self._move(self._device)

    def drop(self) -> None:
        """Free the memory."""
        self._move(torch.device("meta"))

    def copy_(self, tensors: tuple[Tensor | None, ...]) -> None:
        for memory, tensor in zip(self.tensors, tensors, strict=True):
            if memory is not None and tensor is not None:
                memory.copy_(tensor)

    def _move(self, device: torch.device) -> None:
        """Fill with zeros: the last shard of a head has rows beyond the vocabulary."""
        self.codes = torch.zeros_like(self.codes, device=device)
        self.scales = torch.zeros_like(self.scales, device=device)
        self.zeros = None if self.zeros is None else torch.zeros_like(self.zeros, device=device)
        scales = self.output_scales
        self.output_scales = None if scales is None else torch.zeros_like(scales, device=device)


class _Part:
    """The outputs of a product that have the same order of inputs."""

    def __init__(self, outputs: int, inputs: int, form: LayerForm, placement: TensorPlacement) -> None:
        device = placement.device
        self.filled = FilledWeight(outputs, inputs, form, device)
        self.weight = FourBitWeight(outputs, inputs, kernel_form(form, inputs), device, use_triton=placement.use_triton)
        self.order = torch.empty(inputs, device=device, dtype=torch.int32) if form.has_order else None
        self._is_packed = False

    def pack(self) -> None:
        if not self.filled.is_empty:
            self.weight.pack(*self.filled.tensors)
            self.filled.drop()
            self._is_packed = True

    def unpack(self) -> None:
        if self.filled.is_empty:
            self.filled.allocate()
            if self._is_packed:
                self.filled.copy_(self.weight.unpack())


class FourBitLinearMethod(LinearMethod):
    """One product; with groups in another order, one for each projection, because each has its order of inputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        assert isinstance(options, LayerForm)
        self._form = options
        self._sizes = out_features, in_features
        self._placement = placement
        self._parts: dict[int, _Part] = {}  # by their first output, in order
        self._has_one_order = True
        self.bias = torch.empty(out_features, device=placement.device, dtype=placement.dtype) if bias else None
        if not options.has_order:
            self._part(0, out_features)

    @property
    def weights(self) -> list[FourBitWeight]:
        """The weights in memory, whose outputs follow each other."""
        return [part.weight for part in self._parts.values()]

    def weight_shards(
        self, first_output: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None = None
    ) -> WeightShards:
        assert not self._form.group or inputs.start % self._form.group == 0, "keep_layers dequantizes it"
        has_order = self._form.has_order
        part = self._part(first_output, outputs.size) if has_order else self._parts[0]
        first = 0 if has_order else first_output
        yield from part.filled.shards("weight", first, outputs, inputs, rows, self.restore_weights)
        if part.order is not None:
            yield f"weight{NAMES.order}", WeightShard.full(part.order)
        if self.bias is not None:
            mine = slice(first_output, first_output + outputs.size)
            yield "bias", WeightShard(self.bias[mine], (outputs.full_size,), 0, outputs.start, rows=rows)

    def process_weights_after_loading(self) -> None:
        """Pack the filled tensors, always to the same address: captured graphs read it. Raises CheckpointError."""
        for part in self._parts.values():
            part.pack()
        first, *others = (part.order for part in self._parts.values())
        self._has_one_order = first is None or all(other is not None and other.equal(first) for other in others)

    def restore_weights(self) -> None:
        for part in self._parts.values():
            part.unpack()

    def apply(self, x: Tensor) -> Tensor:
        parts = list(self._parts.values())
        order = parts[0].order
        if len(parts) == 1:
            return parts[0].weight.product(x if order is None else x.index_select(1, order), self.bias)
        assert order is not None
        ordered = x.index_select(1, order)
        products = []
        for part in parts:
            assert part.order is not None
            ordered = ordered if self._has_one_order else x.index_select(1, part.order)
            products.append(part.weight.product(ordered))
        y = torch.cat(products, 1)
        return y if self.bias is None else y.add_(self.bias)

    def _part(self, first_output: int, size: int) -> _Part:
        """Return the part that begins at ``first_output``, created at the first call."""
        if first_output not in self._parts:
            self._parts[first_output] = _Part(size, self._sizes[1], self._form, self._placement)
        return self._parts[first_output]
