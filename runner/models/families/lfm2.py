"""LFM2: gated short convolutions, attention with norms of heads in some layers, and MLPs."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention
from runner.models.layers.short_convolution import ShortConvolution

_NAMES = {
    "model.norm.": "model.embedding_norm.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}


class Lfm2ForCausalLM(Decoder):
    def make_attention(self, layer: int) -> Attention:
        return Attention(self.context, layer, head_norms=True)

    def make_mixer(self, layer: int) -> Attention | ShortConvolution:
        attending, recurrent = self.mixers_before(layer)
        if self.config.is_recurrent(self.first_layer + layer):
            return ShortConvolution(self.context, recurrent)
        return self.make_attention(attending)

    def checkpoint_name(self, name: str) -> str:
        for usual, own in _NAMES.items():
            name = name.replace(usual, own)
        return name
