"""GLM-4.5 and later: half of each head is rotated; dense layers, then experts with shared ones."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention
from runner.models.layers.token_predictor import NEXTN_NAMES


class Glm4MoeForCausalLM(Decoder):
    predictor_names = NEXTN_NAMES

    def make_attention(self, layer: int) -> Attention:
        config = self.config
        return Attention(self.context, layer, qkv_bias=config.attention_bias, head_norms=config.use_qk_norm)
