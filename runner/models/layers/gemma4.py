"""Layers of Gemma 4: norms before and after attention and MLP, experts beside the MLP, embeddings per layer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kv.groups import KVCacheGroups
from runner.attention import AttentionBackend
from runner.batch import HeadNorms, RotaryCosSin, Routing
from runner.kernels.reference import apply_rotary, expand_cos_sin
from runner.models.layers.context import ModelContext
from runner.models.layers.decoder_layer import RMSNorm
from runner.models.layers.mlp import MLP
from runner.models.layers.moe import Router
from runner.models.layers.norm_weight import NormWeight
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.vocabulary import VocabParallelEmbedding
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards, prefixed
from runner.models.quantization import ExpertsShard, GatedActivation


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up [tokens, size] from gate_up [tokens, 2 * size]; the tanh form of GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


_GELU = GatedActivation(gelu_and_mul, is_silu=False)


class Gemma4Attention:
    """Attention with norms of queries, keys and values. A layer may read the KV of an earlier one."""

    def __init__(self, context: ModelContext, layer: int, groups: KVCacheGroups) -> None:
        """``layer`` counts the layers of the whole model, ``groups`` are the model's."""
        config = context.config
        gemma4 = config.gemma4
        assert gemma4 is not None
        position = context.position
        heads = config.heads_of(layer)
        size = heads.head_dim
        place = context.placement
        self._layer = layer - position.layers.start
        self._size = size
        self._ops = context.ops
        self._dtype = place.dtype
        self._stores = config.has_kv(layer)
        queries = ShardRange.even(config.num_heads * size, position)
        self._num_heads = queries.size // size
        outputs = {"q_proj": queries}
        self._copies_keys = gemma4.projects_once(config.attention[layer])
        self._num_keys = 0
        if self._stores:
            share = position.parallel.shares(config)[position.rank]
            kv_layer = config.kv_layers.index(layer)
            group = groups.layers[kv_layer] if groups.layers else 0
            held = share.heads_in(groups, group)
            self._num_keys = len(held)
            keys = ShardRange(held.start * size, len(held) * size, heads.num_kv_heads * size)
            outputs |= {"k_proj": keys} if self._copies_keys else {"k_proj": keys, "v_proj": keys}
        self._qkv = MergedColumnParallelLinear(context, config.hidden_size, outputs, bias=False)
        self._out = RowParallelLinear(context, "o_proj", queries, config.hidden_size, bias=False)
        self.project = self._out.apply  # attention output → this shard's part of [tokens, hidden_size]
        self._q_norm = NormWeight(size, place)
        self._k_norm = NormWeight(size, place) if self._stores else None
        self._eps = config.rms_norm_eps
        self._norms: HeadNorms | None = None
        self._ones = torch.ones(size, device=place.device, dtype=place.dtype)

    def __call__(self, x: Tensor, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the attention output before ``project``, [tokens, num_heads * head_dim]; store keys and values."""
        return backend.attend(self._layer, self.store(x, rotary, backend))

    def store(self, x: Tensor, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Store keys and values if the layer has its own, and return the queries [tokens, num_heads, head_dim]."""
        projected = self._qkv.apply(x)
        tokens = len(projected)
        if not self._stores:
            normed = self._ops.rms_norm(projected.view(-1, self._size), self._q_norm.weight)
            heads = normed.view(tokens, self._num_heads, self._size)
            return apply_rotary(heads, *expand_cos_sin(rotary, self._dtype))
        values = self._num_keys * self._size
        raw = projected[:, projected.shape[1] - values :]  # values, or keys where these are one
        normed = self._ops.rms_norm(raw.reshape(-1, self._size).contiguous(), self._ones).view(tokens, values)
        if self._copies_keys:
            projected = torch.cat((projected, normed), dim=1)
        else:
            raw.copy_(normed)
        assert self._norms is not None
        return backend.prepare_and_store(self._layer, projected, rotary, self._norms)

    def weight_shards(self) -> WeightShards:
        yield from self._qkv.weight_shards()
        yield from self._out.weight_shards()
        yield "q_norm.weight", self._q_norm.weight_shard()
        if self._k_norm is not None:
            yield "k_norm.weight", self._k_norm.weight_shard()

    def process_weights_after_loading(self) -> None:
        self._qkv.process_weights_after_loading()
        self._out.process_weights_after_loading()
        if self._k_norm is not None:
            self._norms = HeadNorms(self._q_norm.weight, self._k_norm.weight, self._eps)


class Gemma4MLP(MLP):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(self, context: ModelContext, intermediate_size: int) -> None:
        super().__init__(context, intermediate_size)
        self._activation = _GELU


class Gemma4Experts:
    """Experts of the residual, chosen by a router with a norm of its own."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        moe = config.moe
        placement = context.placement
        assert moe is not None
        position = context.position
        size = moe.intermediate_size
        inner = ShardRange.even(size, position) if position.parallel.ep == 1 else ShardRange.full(size)
        shard = ExpertsShard(position.local_experts(moe), moe.num_experts, config.hidden_size, inner)
        self._experts = context.experts(shard, _GELU)
        self._router = Router(moe, config.hidden_size, placement)
        device = placement.device
        self._scale = torch.empty(config.hidden_size, device=device, dtype=placement.dtype)
        self._norm = torch.empty(config.hidden_size, device=device, dtype=torch.float32)  # with the factor of sizes
        self._factors = torch.empty(moe.num_experts, device=device, dtype=torch.float32)  # factor per expert
        self._ops = context.ops

    def apply(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return this shard's part of the experts' results for x; ``residual`` is routed. All [tokens, hidden_size]."""
        routing = self._router(self._ops.rms_norm(residual, self._norm))
        weights = routing.weights * self._factors[routing.experts.long()]
        return self._experts.apply(x, Routing(weights, routing.experts))

    def weight_shards(self) -> WeightShards:
        for name, shard in self._router.weight_shards():
            yield f"router.proj.{name}", shard
        yield "router.scale", WeightShard.full(self._scale)
        yield "router.per_expert_scale", WeightShard.full(self._factors)
        yield from prefixed("experts.", self._experts.weight_shards())

    def process_weights_after_loading(self) -> None:
        self._experts.process_weights_after_loading()
        torch.mul(self._scale.float(), len(self._scale) ** -0.5, out=self._norm)


class PerLayerGate:
    """Adds the embedding of each token in this layer, through a gate of the hidden state."""

    def __init__(self, context: ModelContext, size: int) -> None:
        hidden_size = context.config.hidden_size
        self._ops = context.ops
        self._gate = MergedColumnParallelLinear(
            context, hidden_size, {"per_layer_input_gate": ShardRange.full(size)}, bias=False
        )
        self._out = MergedColumnParallelLinear(
            context, size, {"per_layer_projection": ShardRange.full(hidden_size)}, bias=False
        )
        self._norm = RMSNorm(context)

    def __call__(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return what is added to ``hidden`` [tokens, hidden_size]; ``embedded`` [tokens, size]."""
        gate = F.gelu(self._gate.apply(hidden), approximate="tanh").mul_(embedded)
        return self._norm(self._out.apply(gate))

    def weight_shards(self) -> WeightShards:
        yield from self._gate.weight_shards()
        yield from self._out.weight_shards()
        yield "post_per_layer_input_norm.weight", self._norm.weight_shard()

    def process_weights_after_loading(self) -> None:
        for part in (self._gate, self._out, self._norm):
            part.process_weights_after_loading()


class Gemma4Layer:
    """One layer of the decoder. Its input and result are whole hidden states, the same on all tensor shards."""

    def __init__(self, context: ModelContext, layer: int, groups: KVCacheGroups) -> None:
        """``layer`` counts the layers of the whole model."""
        config = context.config
        gemma4 = config.gemma4
        assert gemma4 is not None
        self._parallel = context.parallel
        self.attention = Gemma4Attention(context, layer, groups)
        self.is_full = config.attention[layer].window is None
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        names += [f"{name}_feedforward_{number}" for name, number in (("post", 1), ("pre", 2), ("post", 2))] * (
            config.moe is not None
        )
        self._norms = {name: RMSNorm(context) for name in names}
        self.input_norm = self._norms["input"]
        wide = gemma4.wide_mlp and not config.has_kv(layer)
        self._mlp = Gemma4MLP(context, config.intermediate_size * (2 if wide else 1))
        self._experts = None if config.moe is None else Gemma4Experts(context)
        self._per_layer = PerLayerGate(context, gemma4.size_per_layer) if gemma4.size_per_layer else None
        self._scalar = torch.ones(1, device=context.placement.device, dtype=context.placement.dtype)

    def __call__(
        self,
        hidden: Tensor,
        rotary: RotaryCosSin,
        backend: AttentionBackend,
        embedded: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states behind this layer, [tokens, hidden_size].

        ``embedded`` [tokens, size_per_layer] are the tokens' embeddings in this layer. ``output_tokens`` [kept] selects
        tokens after attention.
        """
        norms = self._norms
        attended = self.attention(norms["input"](hidden), rotary, backend)
        if output_tokens is not None:
            attended = attended.index_select(0, output_tokens)
            hidden = hidden.index_select(0, output_tokens)
            embedded = None if embedded is None else embedded.index_select(0, output_tokens)
        projected = self._parallel.all_reduce(self.attention.project(attended))
        hidden = hidden + norms["post_attention"](projected)
        result = self._parallel.all_reduce(self._mlp.apply(norms["pre_feedforward"](hidden)))
        if self._experts is not None:
            routed = self._experts.apply(hidden, norms["pre_feedforward_2"](hidden))
            result = norms["post_feedforward_1"](result) + norms["post_feedforward_2"](
                self._parallel.all_reduce(routed)
            )
        hidden = hidden + norms["post_feedforward"](result)
        if self._per_layer is not None:
            assert embedded is not None
            hidden = hidden + self._per_layer(hidden, embedded)
        return hidden.mul_(self._scalar)

    def weight_shards(self) -> WeightShards:
        for name, norm in self._norms.items():
            stem, _, number = name.rpartition("_")
            behind = f"{stem}_layernorm_{number}" if number.isdecimal() else f"{name}_layernorm"
            yield f"{behind}.weight", norm.weight_shard()
        yield from prefixed("self_attn.", self.attention.weight_shards())
        yield from prefixed("mlp.", self._mlp.weight_shards())
        if self._experts is not None:
            yield from self._experts.weight_shards()
        if self._per_layer is not None:
            yield from self._per_layer.weight_shards()
        yield "layer_scalar", WeightShard.full(self._scalar)

    def process_weights_after_loading(self) -> None:
        for norm in self._norms.values():
            norm.process_weights_after_loading()
        for part in (self.attention, self._mlp, self._experts, self._per_layer):
            if part is not None:
                part.process_weights_after_loading()


class PerLayerEmbedding:
    """The embedding of each token in each layer: of its id, and of its hidden state before the first layer."""

    def __init__(self, context: ModelContext, size: int) -> None:
        config = context.config
        placement = context.placement
        self._num_layers = config.num_layers
        self._size = size
        self._parallel = context.parallel
        self._ops = context.ops
        width = self._num_layers * size
        table = replace(context, config=msgspec.structs.replace(config, hidden_size=width))
        self._table = VocabParallelEmbedding(table)
        outputs = {"per_layer_model_projection": ShardRange.full(width)}
        self._projection = MergedColumnParallelLinear(context, config.hidden_size, outputs, bias=False)
        self._norm = NormWeight(size, placement)
        self._scale = torch.tensor(size**0.5, dtype=placement.dtype, device=placement.device)
        self._projection_scale = config.hidden_size**-0.5

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return [num_layers, tokens, size] of token ids [tokens] and their hidden states [tokens, hidden_size]."""
        by_id = self._parallel.all_reduce(self._table(token_ids)) * self._scale
        projected = self._projection.apply(hidden) * self._projection_scale
        normed = self._ops.rms_norm(projected.view(-1, self._size), self._norm.weight)
        both: Tensor = (normed + by_id.view(-1, self._size)) * 2.0**-0.5
        return both.view(len(token_ids), self._num_layers, self._size).transpose(0, 1).contiguous()

    def weight_shards(self) -> WeightShards:
        yield "embed_tokens_per_layer.weight", self._table.weight_shard()
        yield from self._projection.weight_shards()
        yield "per_layer_projection_norm.weight", self._norm.weight_shard()

    def process_weights_after_loading(self) -> None:
        self._projection.process_weights_after_loading()
        self._norm.process_weights_after_loading()
