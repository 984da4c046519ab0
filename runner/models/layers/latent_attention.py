"""Multi-head latent attention (MLA, arXiv 2405.04434), with the projections of keys and values absorbed.

A head's key is W_k c and its value W_v c, where c is the token's latent. So

    score    qᵀ (W_k c)    =  (W_kᵀ q)ᵀ c         queries are brought into the space of latents
    output   Σ p (W_v c)   =  W_v (Σ p c)         and the mean latent into that of values

All heads attend to the same rows of the cache. A back end may instead expand the rows of long chunks to keys and values
of heads. Tensor shards have their heads' projections, and repeat the projections of latents.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.model.latent import LatentConfig
from runner.attention import AttentionBackend, LatentBackend
from runner.batch import Activations, LatentNorm, RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards

_EPS = 1e-6  # epsilon of the latents' norms, whatever the epsilon of the model's norms, as in transformers


class LatentAttention:
    """Projections of one layer around the attention back end."""

    name = "self_attn"  # before the names of its tensors

    def __init__(self, context: ModelContext, layer: int) -> None:
        """``layer`` counts the layers of this rank that attend."""
        config = context.config
        position = context.position
        placement = context.placement
        latent = config.latent
        assert latent is not None
        self._layer = layer
        self._latent = latent
        self._num_heads = config.num_heads // position.parallel.tp
        self._heads = ShardRange.even(config.num_heads, position)
        row = ShardRange.full(latent.row_size)
        queries = ShardRange.even(config.num_heads * latent.qk_head_dim, position)
        first = {"q_a_proj": ShardRange.full(latent.q_lora_rank)} if latent.q_lora_rank else {"q_proj": queries}
        self._sizes = [next(iter(first.values())).size, latent.row_size]
        self._inputs = MergedColumnParallelLinear(
            context, config.hidden_size, {**first, "kv_a_proj_with_mqa": row}, bias=False
        )
        self.quantized_group = self._inputs.quantized_group  # see MLPBlock
        self._queries: MergedColumnParallelLinear | None = None
        if latent.q_lora_rank:
            self._queries = MergedColumnParallelLinear(context, latent.q_lora_rank, {"q_b_proj": queries}, bias=False)
        self._ops = type(context.ops)(_EPS, context.parallel)

        def weights(*shape: int) -> Tensor:
            return torch.empty(shape, device=placement.device, dtype=placement.dtype)

        self._q_norm = weights(latent.q_lora_rank)
        self._norm = LatentNorm(weights(latent.kv_lora_rank), _EPS)
        # Plain in any weight format: its two parts are factors of batched products, by head.
        outputs = latent.qk_nope_head_dim + latent.v_head_dim
        self._keys_and_values = weights(self._num_heads * outputs, latent.kv_lora_rank)
        values = ShardRange.even(config.num_heads * latent.v_head_dim, position)
        self._out = RowParallelLinear(context, "o_proj", values, config.hidden_size, bias=False)

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the attention output before ``project``, [tokens, num_heads * v_head_dim]; store the tokens' rows."""
        assert isinstance(backend, LatentBackend)
        queries = self.store(x, rotary, backend)
        return attend(self._latent, backend, self._layer, queries, self._keys_and_values).flatten(1)

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Store the tokens' rows, and return the queries [tokens, num_heads, qk_head_dim]."""
        assert isinstance(backend, LatentBackend)
        q, rows = self._inputs.apply(x).split(self._sizes, dim=1)
        if self._queries is not None:
            q = self._queries.apply(self._ops.rms_norm(q.contiguous(), self._q_norm))
        queries: Tensor = q.view(len(q), self._num_heads, self._latent.qk_head_dim)
        with_position = queries[:, :, self._latent.qk_nope_head_dim :]
        backend.store_latents(self._layer, rows, with_position, rotary, self._norm)
        return queries

    def project(self, attended: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        return self._out.apply(attended)

    def weight_shards(self) -> WeightShards:
        latent = self._latent
        queries = self._inputs if self._queries is None else self._queries
        of_query = self._order(latent.qk_nope_head_dim)
        of_row = self._order(latent.kv_lora_rank)
        for name, shard in self._inputs.weight_shards():
            order = {"kv_a_proj_with_mqa": of_row, "q_proj": of_query}.get(name.partition(".")[0])
            yield name, replace(shard, order=order)
        if self._queries is not None:
            yield "q_a_layernorm.weight", WeightShard.full(self._q_norm)
            for name, shard in queries.weight_shards():
                yield name, replace(shard, order=of_query)
        yield "kv_a_layernorm.weight", WeightShard.full(self._norm.weight)
        outputs = len(self._keys_and_values) // self._num_heads
        full = self._heads.full_size * outputs, latent.kv_lora_rank
        yield "kv_b_proj.weight", WeightShard(self._keys_and_values, full, 0, self._heads.start * outputs)
        yield from self._out.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._inputs.process_weights_after_loading()
        if self._queries is not None:
            self._queries.process_weights_after_loading()
        self._out.process_weights_after_loading()

    def _order(self, before: int) -> Tensor | None:
        """Return the order of outputs in memory: rotated ones follow ``before`` others, and pairs are half apart.

        Scores stay equal, because queries and keys have the same order. None: the order of the checkpoint.
        """
        if not self._latent.rope_interleave:
            return None
        rotated = torch.arange(self._latent.qk_rope_head_dim).view(-1, 2).t().flatten()
        return torch.cat((torch.arange(before), before + rotated))


def attend(latent: LatentConfig, backend: LatentBackend, layer: int, queries: Tensor, weight: Tensor) -> Tensor:
    """Return the attention output [tokens, num_heads, v_head_dim] of rotated queries [tokens, num_heads, qk_head_dim].

    ``weight`` [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] is the weight of ``kv_b_proj``.
    """
    tokens, heads = queries.shape[:2]
    values = queries.new_empty(tokens, heads, latent.v_head_dim)
    first = backend.first_expanded
    if first is not None:
        backend.attend_expanded(layer, queries[first:], weight, values[first:])
    if first == 0:
        return values
    sizes = [latent.qk_nope_head_dim, latent.v_head_dim]
    to_keys, to_values = weight.view(heads, sum(sizes), latent.kv_lora_rank).split(sizes, dim=1)
    sizes = [latent.qk_nope_head_dim, latent.qk_rope_head_dim]
    without_position, with_position = queries[:first].split(sizes, dim=2)
    in_latents = queries.new_empty(len(with_position), heads, latent.kv_lora_rank)
    torch.bmm(without_position.transpose(0, 1), to_keys, out=in_latents.transpose(0, 1))
    attended = backend.attend_latents(layer, in_latents, with_position)
    torch.bmm(attended.transpose(0, 1), to_values.transpose(1, 2), out=values[:first].transpose(0, 1))
    return values
