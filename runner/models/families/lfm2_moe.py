"""LFM2 with experts in place of the MLPs of all layers but the first ones."""

from __future__ import annotations

import msgspec
from torch import Tensor

from pdserve.model.moe import MoEConfig
from runner.batch import Routing
from runner.models.families.lfm2 import Lfm2ForCausalLM
from runner.models.layers.mlp import MLPBlock
from runner.models.layers.moe import MixtureOfExperts, Router
from runner.placement import TensorPlacement

_LEAST_SUM = 1e-6  # added to the sum that scores are divided by


class Lfm2Router(Router):
    """Divides the scores of the chosen experts by a little more than their sum."""

    def __init__(self, moe: MoEConfig, hidden_size: int, placement: TensorPlacement) -> None:
        plain = msgspec.structs.replace(moe, renormalize=False, routed_scaling_factor=1.0)
        super().__init__(plain, hidden_size, placement)
        self._renormalizes = moe.renormalize
        self._scale = moe.routed_scaling_factor

    def __call__(self, x: Tensor) -> Routing:
        weights, experts = super().__call__(x)
        if self._renormalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
        return Routing(weights * self._scale, experts)


class Lfm2Experts(MixtureOfExperts):
    router_class = Lfm2Router


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    def make_mlp(self, layer: int) -> MLPBlock:
        moe = self.config.moe
        assert moe is not None
        return super().make_mlp(layer) if moe.is_dense(layer) else Lfm2Experts(self.context)

    def checkpoint_name(self, name: str) -> str:
        return super().checkpoint_name(name).replace(".gate.e_score_correction_bias", ".expert_bias")
