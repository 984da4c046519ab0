"""Qwen3: RMS norms of query and key heads; biases in attention where config.json says so."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention


class Qwen3ForCausalLM(Decoder):
    def make_attention(self, layer: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.context, layer, qkv_bias=bias, out_bias=bias, head_norms=True)
