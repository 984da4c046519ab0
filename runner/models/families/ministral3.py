"""Ministral 3, Devstral and Mistral Medium 3.5: Mistral with queries that are scaled by their position."""

from __future__ import annotations

from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import RotaryCosSin
from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention
from runner.models.layers.rotary import scale_queries


class Ministral3Attention(Attention):
    def _store(self, projected: Tensor, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        return scale_queries(super()._store(projected, rotary, backend), rotary)


class Ministral3ForCausalLM(Decoder):
    def make_attention(self, layer: int) -> Attention:
        return Ministral3Attention(self.context, layer)
