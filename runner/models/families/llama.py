"""Llama: biases in attention and MLP where config.json says so."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention
from runner.models.layers.mlp import MLP


class LlamaForCausalLM(Decoder):
    def make_attention(self, layer: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.context, layer, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, layer: int) -> MLP:
        return MLP(self.context, self.config.intermediate_size, bias=self.config.mlp_bias)
