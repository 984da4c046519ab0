"""Granite 4: Mamba2 or attention in each layer, an MLP or experts beside it, and factors of most results."""

from __future__ import annotations

from functools import partial

from runner.models.layers.decoder_layer import Mixer
from runner.models.layers.hybrid import FactoredMLP, ScaledAttention, ScaledBlock
from runner.models.layers.mamba2 import Mamba2Mixer
from runner.models.layers.mlp import MLPBlock
from runner.models.layers.moe import MixtureOfExperts
from runner.models.scaled_decoder import ScaledDecoder

_NAMES = (
    (".mlp.gate.", ".block_sparse_moe.router.layer."),
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),  # as transformers 5 saves it
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.shared_experts.", ".shared_mlp."),
    (".mlp.", ".shared_mlp."),
)


class GraniteMoeHybridForCausalLM(ScaledDecoder):
    def make_mixer(self, layer: int) -> Mixer:
        attending, recurrent = self.mixers_before(layer)
        if self.config.is_recurrent(self.first_layer + layer):
            return Mamba2Mixer(self.context, recurrent)
        return ScaledAttention(self.context, attending)

    def make_mlp(self, layer: int) -> MLPBlock:
        scale = self.mamba2.residual_scale
        if self.config.moe is None:
            return FactoredMLP(self.context, self.config.intermediate_size, fused=True, scale=scale)
        experts = MixtureOfExperts(self.context, partial(FactoredMLP, fused=True))
        return experts if scale == 1 else ScaledBlock(experts, scale)

    def checkpoint_name(self, name: str) -> str:
        for usual, stored in _NAMES:
            name = name.replace(usual, stored)
        return name
