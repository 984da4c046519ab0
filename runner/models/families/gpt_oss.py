"""gpt-oss: attention with sinks, windows in every second layer, and experts with biases."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.models.decoder import Decoder
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.weight_shard import WeightShard, WeightShards


class GptOssAttention(Attention):
    def __init__(self, context: ModelContext, layer: int) -> None:
        config = context.config
        placement = context.placement
        super().__init__(context, layer, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        self._head_dim = config.head_dim
        self._num_heads = config.num_heads
        local = self.heads.size // config.head_dim
        self._sinks = torch.empty(local, device=placement.device, dtype=placement.dtype)

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        return backend.attend(self._layer, self.store(x, rotary, backend), self._sinks)

    def weight_shards(self) -> WeightShards:
        yield from super().weight_shards()
        yield "sinks", WeightShard(self._sinks, (self._num_heads,), 0, self.heads.start // self._head_dim)


class GptOssForCausalLM(Decoder):
    def make_attention(self, layer: int) -> Attention:
        return GptOssAttention(self.context, layer)

    def checkpoint_name(self, name: str) -> str:
        return name.replace(".mlp.gate.", ".mlp.router.")
