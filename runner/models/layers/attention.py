"""Projections and norms of one layer around the attention back end."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, HeadNorms, RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.norm_weight import NormWeight
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.rotary import rotary_order
from runner.models.layers.weight_shard import ShardRange, WeightShards


class Attention:
    """Projections of one layer around the attention back end."""

    name = "self_attn"  # before the names of its tensors

    def __init__(
        self,
        context: ModelContext,
        layer: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norms: bool = False,
        in_features: int = 0,
    ) -> None:
        """``layer`` counts the layers of this rank that attend; ``head_norms`` norms each query and key head.

        ``in_features``: inputs of queries, keys and values; 0: the model's hidden_size.
        """
        config = context.config
        position = context.position
        self._layer = layer
        share = position.parallel.shares(config)[position.rank]
        self._order = rotary_order(config.rope, config.head_dim)
        self.heads = heads = ShardRange.even(config.num_heads * config.head_dim, position)
        counts = share.first_head, share.num_heads, share.total_heads
        self.kv_heads = kv_heads = ShardRange(*(count * config.head_dim for count in counts))
        outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        rows = {}
        self._num_gates = heads.size if config.has_output_gate else 0
        if self._num_gates:
            outputs["q_proj"] = ShardRange(0, 2 * heads.size, 2 * heads.full_size)
            rows["q_proj"] = _gates_before_queries(heads, config.head_dim, self._order)
        self._qkv = MergedColumnParallelLinear(context, in_features or config.hidden_size, outputs, qkv_bias, rows)
        self._ops = context.ops
        self._out = RowParallelLinear(context, "o_proj", heads, config.hidden_size, out_bias)
        self.quantized_group = self._qkv.quantized_group  # see MLPBlock
        self._head_norms: tuple[NormWeight, NormWeight] | None = None  # norms of queries and keys
        self._norms: HeadNorms | None = None
        if head_norms:
            q, k = (NormWeight(config.head_dim, context.placement, config.centered_norms) for _ in range(2))
            self._head_norms = (q, k)
            self._norms = HeadNorms(q.weight, k.weight, config.rms_norm_eps)

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the attention output before ``project``, [tokens, num_heads * head_dim]; store keys and values."""
        if not self._num_gates:
            return backend.attend(self._layer, self.store(x, rotary, backend))
        projected = self._qkv.apply(x)
        queries = self._store(projected, rotary, backend)
        return self._ops.sigmoid_and_mul(projected[:, : self._num_gates], backend.attend(self._layer, queries))

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Store keys and values, and return the queries."""
        return self._store(self._qkv.apply(x), rotary, backend)

    def _store(self, projected: Tensor, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """``projected`` [tokens, …]: gates if there are any, queries, keys and values."""
        return backend.prepare_and_store(self._layer, projected[:, self._num_gates :], rotary, self._norms)

    def project(self, attended: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        return self._out.apply(attended)

    def weight_shards(self) -> WeightShards:
        for name, shard in self._qkv.weight_shards():
            ordered = name.startswith("v_proj") or shard.rows is not None
            yield name, shard if ordered else replace(shard, order=self._order)
        yield from self._out.weight_shards()
        for name, weight in self.norm_weights():
            yield name, replace(weight, order=self._order)

    def norm_weights(self) -> WeightShards:
        """Yield the weights of the norms of queries and keys."""
        for name, norm in zip(("q_norm", "k_norm"), self._head_norms or (), strict=False):
            yield f"{name}.weight", norm.weight_shard()

    def process_weights_after_loading(self) -> None:
        self._qkv.process_weights_after_loading()
        self._out.process_weights_after_loading()
        for norm in self._head_norms or ():
            norm.process_weights_after_loading()
        if self._norms is not None:
            self._norms = replace(self._norms)


def _gates_before_queries(heads: ShardRange, head_dim: int, order: Tensor | None) -> Tensor:
    """Return the rows of q_proj of a shard: the checkpoint has queries and gates head by head."""
    first = torch.arange(heads.start, heads.start + heads.size, head_dim)[:, None] * 2  # row of each head
    queries = first + (torch.arange(head_dim) if order is None else order)
    gates = first + head_dim + torch.arange(head_dim)
    return torch.cat((gates.flatten(), queries.flatten()))
