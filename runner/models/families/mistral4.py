"""Mistral Small 4: DeepSeek's latent attention with scaled queries, and experts chosen by softmax."""

from __future__ import annotations

from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from runner.models.layers.latent_attention import LatentAttention
from runner.models.layers.rotary import scale_queries


class Mistral4Attention(LatentAttention):
    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        return scale_queries(super().store(x, rotary, backend), rotary)


class Mistral4ForCausalLM(DeepseekV2ForCausalLM):
    def make_attention(self, layer: int) -> Mistral4Attention:
        return Mistral4Attention(self.context, layer)
