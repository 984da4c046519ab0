"""Falcon-H1: attention and Mamba2 side by side in each layer, and factors of most inputs and results."""

from __future__ import annotations

from runner.models.layers.decoder_layer import Mixer
from runner.models.layers.hybrid import FactoredMLP, ParallelMixers, ScaledAttention
from runner.models.layers.mamba2 import Mamba2Mixer
from runner.models.layers.mlp import MLPBlock
from runner.models.scaled_decoder import ScaledDecoder

_NAMES = (
    (".mixers.", "."),
    (".mlp.", ".feed_forward."),
    (".post_attention_layernorm.", ".pre_ff_layernorm."),
    ("model.norm.", "model.final_layernorm."),
)


class FalconH1ForCausalLM(ScaledDecoder):
    def make_mixer(self, layer: int) -> Mixer:
        return ParallelMixers(ScaledAttention(self.context, layer), Mamba2Mixer(self.context, layer))

    def make_mlp(self, layer: int) -> MLPBlock:
        mamba2 = self.mamba2
        scales = {"gate_scale": mamba2.gate_scale, "scale": mamba2.down_scale}
        return FactoredMLP(self.context, self.config.intermediate_size, fused=False, **scales)

    def checkpoint_name(self, name: str) -> str:
        for usual, stored in _NAMES:
            name = name.replace(usual, stored)
        return name
