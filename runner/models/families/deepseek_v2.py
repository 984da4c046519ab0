"""DeepSeek-V2 and V2-Lite: latent attention; dense layers, then experts with shared ones, chosen by softmax."""

from __future__ import annotations

from runner.models.decoder import Decoder
from runner.models.layers.latent_attention import LatentAttention
from runner.models.layers.token_predictor import NEXTN_NAMES


class DeepseekV2ForCausalLM(Decoder):
    predictor_names = NEXTN_NAMES  # for DeepSeek-V3 and GLM-4.7-Flash

    def make_attention(self, layer: int) -> LatentAttention:
        return LatentAttention(self.context, layer)
