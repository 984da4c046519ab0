"""Qwen3-Next: gated delta nets, attention with an output gate in every fourth layer, and experts with a shared one."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention
from runner.models.layers.gated_delta_net import GatedDeltaNet
from runner.models.layers.token_predictor import QWEN_NAMES


class Qwen3NextForCausalLM(Decoder):
    unused_tensors = ("mtp.",)
    predictor_names = QWEN_NAMES
    merged_inputs = True  # gated delta nets have merged input projections

    def make_attention(self, layer: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.context, layer, qkv_bias=bias, out_bias=bias, head_norms=True)

    def make_mixer(self, layer: int) -> Attention | GatedDeltaNet:
        attending, recurrent = self.mixers_before(layer)
        if self.config.is_recurrent(self.first_layer + layer):
            return GatedDeltaNet(self.context, recurrent, merged=self.merged_inputs)
        return self.make_attention(attending)

    def checkpoint_name(self, name: str) -> str:
        return name.replace(".shared_experts.", ".shared_expert.")
