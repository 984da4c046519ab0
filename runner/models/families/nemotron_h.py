"""Nemotron-H and Nemotron 3: layers of one part each: Mamba2, attention without positions, an MLP, or experts."""

from __future__ import annotations

from pdserve.model.mamba2 import ATTENTION, EXPERTS, MAMBA
from runner.models.layers.attention import Attention
from runner.models.layers.decoder_layer import AnyLayer
from runner.models.layers.mamba2 import Mamba2Mixer
from runner.models.layers.mlp import UngatedMLP
from runner.models.layers.moe import MixtureOfExperts
from runner.models.layers.one_part_layers import MixerLayer, MLPLayer
from runner.models.scaled_decoder import ScaledDecoder

_NAMES = (("model.embed_tokens.", "model.embeddings."), ("model.norm.", "model.norm_f."))


class NemotronHForCausalLM(ScaledDecoder):
    unused_tensors = ("mtp.",)

    def make_layer(self, layer: int) -> AnyLayer:
        number = self.first_layer + layer
        self._number_parts(number)
        attending, recurrent = self.mixers_before(layer)
        kind = self.mamba2.blocks[number]
        if kind == MAMBA:
            return MixerLayer(self.context, Mamba2Mixer(self.context, recurrent))
        if kind == ATTENTION:
            return MixerLayer(self.context, Attention(self.context, attending))
        if kind == EXPERTS:
            return MLPLayer(self.context, MixtureOfExperts(self.context, UngatedMLP))
        config = self.config
        return MLPLayer(self.context, UngatedMLP(self.context, config.intermediate_size, bias=config.mlp_bias))

    def checkpoint_name(self, name: str) -> str:
        for usual, stored in _NAMES:
            name = name.replace(usual, stored)
        return name
