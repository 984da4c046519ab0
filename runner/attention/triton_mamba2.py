"""The recurrent part of Mamba2 mixers by Triton kernels."""

from __future__ import annotations

from torch import Tensor

from runner.attention.triton_gated_delta import HeadInputs, TritonGatedDelta
from runner.batch import GatedDeltaWeights, Mamba2Weights
from runner.kernels.gated_delta_chunks import DeltaChunks
from runner.kernels.mamba2 import chunk_state_space, state_space


class TritonMamba2(TritonGatedDelta):
    """``run`` takes time steps [tokens, value_heads] in place of betas and decays."""

    gates_per_head = 1
    normed = False

    def _advance(
        self,
        inputs: HeadInputs,
        weights: GatedDeltaWeights,
        states: Tensor,
        rows: tuple[Tensor, Tensor, Tensor | None],
        out: Tensor | None,
        ends: Tensor | None = None,
        drafted: Tensor | None = None,
    ) -> None:
        assert isinstance(weights, Mamba2Weights)
        state_space(*inputs, weights, states, *rows, out, self._most_short, ends, drafted)

    def _advance_chunks(
        self,
        inputs: HeadInputs,
        weights: GatedDeltaWeights,
        states: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        chunks: DeltaChunks,
    ) -> None:
        assert isinstance(weights, Mamba2Weights)
        chunk_state_space(*inputs, weights, states, *rows, out, chunks.rows)
