"""Qwen2: biases on queries, keys and values, none on the output projection."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention


class Qwen2ForCausalLM(Decoder):
    def make_attention(self, layer: int) -> Attention:
        return Attention(self.context, layer, qkv_bias=True)
