"""Projections and norms of one layer around the attention back end."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, HeadNorms, RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.rotary import rotary_order
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards


class Attention:
    """Projections of one layer around the attention back end."""

    def __init__(
        self,
        context: ModelContext,
        layer: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norms: bool = False,
    ) -> None:
        """``layer`` counts from 0 on this rank; ``head_norms`` norms each query and key head."""
        config, position = context.config, context.position
        self._layer = layer
        share = position.parallel.shares(config.num_kv_heads)[position.rank]
        self.heads = heads = ShardRange.even(config.num_heads * config.head_dim, position)
        counts = share.first_head, share.num_heads, share.total_heads
        self.kv_heads = kv_heads = ShardRange(*(count * config.head_dim for count in counts))
        outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self._qkv = MergedColumnParallelLinear(context, config.hidden_size, outputs, qkv_bias)
        self._out = RowParallelLinear(context, "o_proj", heads, config.hidden_size, out_bias)
        self.quantized_group = self._qkv.quantized_group  # see MLPBlock
        self._order = rotary_order(config.rope, config.head_dim)
        self._norms: HeadNorms | None = None
        if head_norms:
            q_weight = torch.empty(config.head_dim, device=context.placement.device, dtype=context.placement.dtype)
            self._norms = HeadNorms(q_weight, torch.empty_like(q_weight), config.rms_norm_eps)

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the attention output before ``project``, [tokens, num_heads * head_dim]; store keys and values."""
        return backend.attend(self._layer, self.store(x, rotary, backend))

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Store keys and values, and return the queries."""
        return backend.prepare_and_store(self._layer, self._qkv.apply(x), rotary, self._norms)

    def project(self, attended: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        return self._out.apply(attended)

    def weight_shards(self) -> WeightShards:
        for name, shard in self._qkv.weight_shards():
            yield name, shard if name.startswith("v_proj") else replace(shard, order=self._order)
        yield from self._out.weight_shards()
        for name, weight in self.norm_weights():
            yield name, replace(weight, order=self._order)

    def norm_weights(self) -> WeightShards:
        """Yield the weights of the norms of queries and keys."""
        if self._norms is not None:
            yield "q_norm.weight", WeightShard.full(self._norms.q_weight)
            yield "k_norm.weight", WeightShard.full(self._norms.k_weight)

    def process_weights_after_loading(self) -> None:
        self._qkv.process_weights_after_loading()
        self._out.process_weights_after_loading()
        if self._norms is not None:
            self._norms = replace(self._norms)
