"""The decoder that Llama, Mistral and Qwen3 have in common; they differ in biases, head norms and sliding windows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.config.model_config import ModelConfig
from pdserve.config.parallel import NO_LATE_MLPS, LateMLPs
from runner.attention import AttentionBackend
from runner.batch import HeadNorms, RotaryCosSin
from runner.distributed.parallel_state import ParallelState
from runner.loading.weights import TensorShard
from runner.models.layers.parallel_linear import ColumnParallel, Parts, RowParallel, WeightRange
from runner.models.layers.pointwise_ops import Ops, build_ops
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.layers.vocabulary import Embedding, OutputProjection
from runner.placement import TensorPlacement

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class RMSNorm:
    def __init__(self, size: int, place: TensorPlacement, ops: Ops) -> None:
        self.weight = torch.empty(size, device=place.device, dtype=place.dtype)
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weight)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x, of which each shard has a part, to ``residual`` in place, and norm the sum."""
        return self._ops.add_norm(x, residual, self.weight)


class Attention:
    def __init__(self, config: ModelConfig, layer: int, world: ParallelState, place: TensorPlacement) -> None:
        """``layer`` counts from 0 on this rank."""
        self._layer = layer
        queries, keys = _runs_of_heads(config, world)
        runs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv = ColumnParallel(config.hidden_size, runs, config.attention_bias, place)
        self.out = RowParallel("o_proj", queries, config.hidden_size, config.attention_bias, world.place, place)
        self._norms = _head_norms(config, place) if config.qk_norm else None

    def attend(self, x: Tensor, turn: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """What the heads of each token see, before ``out``: [tokens, num_heads * head_dim]. Stores keys and values."""
        q = backend.prepare_and_store(self._layer, self.qkv(x), turn, self._norms)
        return backend.attend(self._layer, q)

    def store(self, x: Tensor, turn: RotaryCosSin, backend: AttentionBackend) -> None:
        """Store keys and values alone."""
        backend.prepare_and_store(self._layer, self.qkv(x), turn, self._norms)

    def parts(self) -> Parts:
        yield from self.qkv.parts()
        yield from self.out.parts()
        if self._norms is not None:
            yield "q_norm.weight", TensorShard.whole(self._norms.q_weight)
            yield "k_norm.weight", TensorShard.whole(self._norms.k_weight)

    def seal(self) -> None:
        self.qkv.seal()
        self.out.seal()
        if self._norms is not None:
            self._norms = replace(self._norms)


class MLP:
    """down(silu(gate(x)) * up(x)) of the normed residual, gate and up in one product."""

    def __init__(self, config: ModelConfig, world: ParallelState, place: TensorPlacement, ops: Ops) -> None:
        self._ops = ops
        self._norm = RMSNorm(config.hidden_size, place, ops)
        run = WeightRange.of_shard(config.intermediate_size, world.place)
        self.gate_up = ColumnParallel(config.hidden_size, {"gate_proj": run, "up_proj": run}, config.mlp_bias, place)
        self.down = RowParallel("down_proj", run, config.hidden_size, config.mlp_bias, world.place, place)

    def __call__(self, residual: Tensor) -> Tensor:
        return self._product(self._norm(residual))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Of the residual with x, of which each shard has a part, added to it in place."""
        return self._product(self._norm.add(x, residual))

    def parts(self) -> Parts:
        yield "post_attention_layernorm.weight", TensorShard.whole(self._norm.weight)
        yield from _prefixed("mlp.", self.gate_up.parts())
        yield from _prefixed("mlp.", self.down.parts())

    def seal(self) -> None:
        self.gate_up.seal()
        self.down.seal()

    def _product(self, x: Tensor) -> Tensor:
        return self.down(self._ops.silu_mul(self.gate_up(x)))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, world: ParallelState, place: TensorPlacement, ops: Ops) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, place, ops)
        self.attention = Attention(config, layer, world, place)
        self.mlp = MLP(config, world, place, ops)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        turn: RotaryCosSin,
        backend: AttentionBackend,
        keep: Tensor | None = None,
        without_mlp: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """From the residual and x, its norm; all are [tokens, hidden_size].

        What attention adds is added here, in place, unless the MLP is left out; the caller adds the result (each shard
        has a part of it), together with the norm that follows. ``keep`` [kept] names the tokens to go on with after
        attention: the results are [kept, hidden_size].
        """
        heads = self.attention.attend(x, turn, backend)
        if keep is not None:
            heads, residual = heads.index_select(0, keep), residual.index_select(0, keep)
        x = self.attention.out(heads)
        return (x if without_mlp else self.mlp.add(x, residual)), residual

    def parts(self) -> Parts:
        yield "input_layernorm.weight", TensorShard.whole(self.attention_norm.weight)
        yield from _prefixed("self_attn.", self.attention.parts())
        yield from self.mlp.parts()

    def seal(self) -> None:
        self.attention.seal()
        self.mlp.seal()


class Decoder:
    """A rank's part of the model: token ids to hidden states, hidden states to logits.

    The first stage has the embedding, the last one the norm and the head. Where MLPs are shared, stages but the first
    also have the MLP of the layer before theirs. Fill ``parts``, then ``seal``, then call.
    """

    def __init__(self, config: ModelConfig, world: ParallelState, place: TensorPlacement, use_triton: bool) -> None:
        """``config`` is that of the whole model."""
        self._config, self._world, stage = config, world, world.place
        self._first_layer = stage.layers.start
        self._is_whole = stage.split.tp == 1
        ops = build_ops(config.rms_norm_eps, world, place, use_triton)
        self._embedding = Embedding(config, stage, place) if stage.is_first else None
        self.layers = [DecoderLayer(config, layer, world, place, ops) for layer in range(len(stage.layers))]
        self._mlp_before = MLP(config, world, place, ops) if stage.shares_mlp_before else None
        self._next_norms = [layer.attention_norm for layer in self.layers[1:]]
        self._norm = RMSNorm(config.hidden_size, place, ops) if stage.is_last else None
        self._head = OutputProjection(config, world, place) if stage.is_last else None
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings, place)

    def __call__(
        self,
        start: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        keep: Tensor | None = None,
        late: LateMLPs = NO_LATE_MLPS,
    ) -> Tensor:
        """Compute the layers of this rank for tokens at ``positions`` [tokens], integers.

        ``start`` is the tokens' ids [tokens] on the first stage, else what the stage before returned, which is changed.
        The result is hidden states [tokens, hidden_size]: on the last stage normed for ``logits``, else the residual
        after these layers, with which the next stage starts.

        ``lengths``: see RotaryEmbedding.turn. ``backend`` has planned the same tokens. ``keep`` [kept] names, on the
        last stage, the tokens whose hidden states are wanted, then [kept, hidden_size]: the others need no more of the
        last layer than their keys and values. ``late``: see parallel.py. Nothing waits for the device, so that on
        a GPU the call can be captured into a graph.
        """
        turn = self.rotary.turn(positions, lengths)
        x, residual = self._begin(start, late.here)
        *others, last = self.layers
        for layer, next_norm in zip(others, self._next_norms, strict=True):
            x, residual = layer(x, residual, turn, backend)
            x = next_norm.add(x, residual)
        if keep is not None and not len(keep):
            last.attention.store(x, turn, backend)
            return x[:0]
        x, residual = last(x, residual, turn, backend, keep, late.behind)
        return residual.add_(self._world.all_reduce(x)) if self._norm is None else self._norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] from rows of hidden states [rows, hidden_size], on the last stage."""
        assert self._head is not None
        return self._head(hidden)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """``logits`` into ``out``, on GPUs."""
        assert self._head is not None
        self._head.write(hidden, out)

    def parts(self) -> Parts:
        """What this rank needs of the checkpoint, each with the memory that it belongs in."""
        if self._embedding is not None:
            yield _EMBEDDING, self._embedding.part()
        for index, layer in enumerate(self.layers, self._first_layer):
            yield from _prefixed(f"model.layers.{index}.", layer.parts())
        if self._mlp_before is not None:
            yield from _prefixed(f"model.layers.{self._first_layer - 1}.", self._mlp_before.parts())
        if self._norm is not None:
            yield _NORM, TensorShard.whole(self._norm.weight)
        if self._head is not None and not self._config.tie_word_embeddings:
            yield _HEAD, self._head.part()
        elif self._head is not None and self._embedding is None:
            yield _EMBEDDING, self._head.part()

    def elsewhere(self) -> set[str]:
        """The checkpoint's other tensors: what other stages need, and a copy of the embedding as a tied head."""
        of_layer = [name for name, _ in self.layers[0].parts()]
        names = {f"model.layers.{layer}.{name}" for layer in range(self._config.num_layers) for name in of_layer}
        return (names | {_EMBEDDING, _NORM, _HEAD}).difference(name for name, _ in self.parts())

    def seal(self) -> None:
        """Bring filled weights into the form they are used in."""
        if self._head is not None:
            if self._config.tie_word_embeddings and self._embedding is not None:
                self._head.tie(self._embedding)
            self._head.seal()
        for layer in self.layers:
            layer.seal()
        if self._mlp_before is not None:
            self._mlp_before.seal()

    def _begin(self, start: Tensor, with_mlp: bool) -> tuple[Tensor, Tensor]:
        """x, normed for the first layer, and the residual."""
        norm = self.layers[0].attention_norm
        if with_mlp:
            assert self._mlp_before is not None
            return norm.add(self._mlp_before(start), start), start
        if self._embedding is None:
            return norm(start), start
        embedded = self._embedding(start)
        if self._is_whole:
            return norm(embedded), embedded
        residual = torch.zeros_like(embedded)
        return norm.add(embedded, residual), residual


def _runs_of_heads(config: ModelConfig, world: ParallelState) -> tuple[WeightRange, WeightRange]:
    """What a shard has of the rows of queries, and of those of keys and of values."""
    split, size = world.place.split, config.head_dim
    share = split.shares(config.num_kv_heads)[world.place.rank]
    keys = WeightRange(share.num_heads * size, share.total_heads * size, share.first_head * size)
    return WeightRange.of_shard(config.num_heads * size, world.place), keys


def _head_norms(config: ModelConfig, place: TensorPlacement) -> HeadNorms:
    q_weight = torch.empty(config.head_dim, device=place.device, dtype=place.dtype)
    return HeadNorms(q_weight, torch.empty_like(q_weight), config.rms_norm_eps)


def _prefixed(prefix: str, parts: Parts) -> Parts:
    return ((prefix + name, part) for name, part in parts)
