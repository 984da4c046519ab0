"""Weights of experts that stay in MXFP4 in memory: 4.25 bits each, in the words of ``mxfp4_words.py``.

Tensor cores multiply them with activations in the model's dtype. Without Triton an expert is dequantized for each use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdserve.errors import CheckpointError, ConfigError
from runner.kernels.experts import mxfp4_words
from runner.kernels.experts.mxfp4_words import BLOCK, E8M0_BIAS, LARGEST_SCALE
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.placement import TensorPlacement

if TYPE_CHECKING:
    from runner.kernels.experts.grouped_tiles import GroupedRows  # it imports Triton


class Mxfp4Stack:
    """``words`` and ``scales`` of all experts. The checkpoint's form exists only while a layer is filled."""

    def __init__(self, shape: tuple[int, int, int], placement: TensorPlacement, gated: bool = False) -> None:
        """``shape``: experts, outputs, inputs. If ``gated``, outputs are gates and ups, which alternate.

        Raises ConfigError for a compiler that is known to be wrong.
        """
        experts, outputs, inputs = shape
        assert inputs % BLOCK == 0, "kept_problem refuses it"
        self._inputs = inputs
        self._is_gated = gated
        self._is_packed = False
        if placement.use_triton and placement.device.type == "cuda":
            _check_compiler(placement.device)
        words, scales = mxfp4_words.packed_shapes(outputs, inputs)
        self.words = torch.empty(experts, *words, device=placement.device, dtype=torch.int16)
        self.scales = torch.empty(experts, *scales, device=placement.device, dtype=torch.uint8)
        self._blocks = torch.empty(experts, outputs, inputs // BLOCK, BLOCK // 2, device="meta", dtype=torch.uint8)
        self._block_scales = torch.empty(experts, outputs, inputs // BLOCK, device="meta", dtype=torch.uint8)

    def weight_shards(self, name: str, experts: ShardRange, outputs: ShardRange, inputs: ShardRange) -> WeightShards:
        blocks = ShardRange(*(size // BLOCK for size in inputs))
        ranges = experts, outputs, blocks
        values = WeightShard.of_ranges(self._blocks, (*ranges, ShardRange.full(BLOCK // 2)), self.restore)
        yield f"{name}_blocks", values
        yield f"{name}_scales", WeightShard.of_ranges(self._block_scales, ranges, self.restore)

    def process_weights_after_loading(self) -> None:
        """Pack the filled tensors, always to the same address: captured graphs read it. Raises CheckpointError."""
        if self._block_scales.numel() and int(self._block_scales.max()) > LARGEST_SCALE:
            raise CheckpointError(
                f"experts have an MXFP4 scale of 2^{int(self._block_scales.max()) - E8M0_BIAS}; V2 takes scales up to "
                f"2^{LARGEST_SCALE - E8M0_BIAS}. Choose V1, which dequantizes them"
            )
        for index in range(len(self.words)):  # one by one, because codes take memory
            self.words[index] = mxfp4_words.pack(self._stored(self._blocks[index]))
            self.scales[index] = mxfp4_words.pack_scales(self._stored(self._block_scales[index]))
        self._blocks = self._blocks.to("meta")
        self._block_scales = self._block_scales.to("meta")
        self._is_packed = True

    def restore(self) -> None:
        """Undo ``process_weights_after_loading``."""
        if not self._blocks.is_meta:
            return
        self._blocks = torch.empty_like(self._blocks, device=self.words.device)
        self._block_scales = torch.empty_like(self._block_scales, device=self.words.device)
        for index in range(len(self.words) if self._is_packed else 0):
            self._blocks[index] = self._read(mxfp4_words.unpack(self.words[index], self._inputs))
            self._block_scales[index] = self._read(mxfp4_words.unpack_scales(self.scales[index], self._inputs))

    def rows_of_experts(self, experts: Tensor, local: range) -> GroupedRows:
        from runner.kernels.experts.grouped_mxfp4 import rows_of_experts

        return rows_of_experts(experts, local)

    def product(self, x: Tensor, bias: Tensor, rows: GroupedRows) -> Tensor:
        from runner.kernels.experts.grouped_mxfp4 import grouped_mxfp4

        assert not self._is_gated
        return grouped_mxfp4(x, self.words, self.scales, bias, rows)

    def activations(self, x: Tensor, bias: Tensor, rows: GroupedRows, alpha: float, limit: float) -> Tensor:
        from runner.kernels.experts.grouped_mxfp4 import ClampedSwiGLU, grouped_mxfp4

        assert self._is_gated
        return grouped_mxfp4(x, self.words, self.scales, bias, rows, ClampedSwiGLU(alpha, limit))

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's weight [outputs, inputs] in ``dtype``, rounded once from float32."""
        return self._read(mxfp4_words.dequantized(self.words[index], self.scales[index], self._inputs)).to(dtype)

    def _stored(self, x: Tensor) -> Tensor:
        """Return x [outputs, …] in the order of ``words``."""
        return mxfp4_words.gates_first(x) if self._is_gated else x

    def _read(self, x: Tensor) -> Tensor:
        """Undo ``_stored``."""
        return mxfp4_words.alternating(x) if self._is_gated else x


def _check_compiler(device: torch.device) -> None:
    import triton

    from runner.kernels.experts.grouped_mxfp4 import compiler_problem

    problem = compiler_problem(torch.cuda.get_device_capability(device), triton.__version__)
    if problem:
        raise ConfigError(problem)
