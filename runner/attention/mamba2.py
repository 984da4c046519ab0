"""The recurrent part of Mamba2 mixers over the states of a rank, in plain torch."""

from __future__ import annotations

from torch import Tensor

from runner.attention.gated_delta import TorchGatedDelta
from runner.batch import GatedDeltaWeights, Mamba2Weights
from runner.kernels.gated_delta_reference import DeltaInputs
from runner.kernels.mamba2_reference import state_space_chunks, state_space_step, steps_of


class TorchMamba2(TorchGatedDelta):
    """``run`` takes time steps [tokens, value_heads] in place of betas and decays."""

    def _inputs(self, convolved: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> DeltaInputs:
        assert isinstance(weights, Mamba2Weights)
        return DeltaInputs(*self._heads(convolved), *steps_of(ba, weights))

    def _one_token(self, inputs: DeltaInputs, state: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
        assert isinstance(weights, Mamba2Weights)
        return state_space_step(inputs, state, weights.skip)

    def _tokens(self, inputs: DeltaInputs, state: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
        assert isinstance(weights, Mamba2Weights)
        return state_space_chunks(inputs, state, weights.skip)
