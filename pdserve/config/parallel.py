"""How a node splits a model over its ranks: pipeline stages by layers, and each stage into tensor shards.

                        tensor shards, --tp 2
                        shard 0   shard 1
    stage 0, layers 0…  rank 0    rank 1        rank = stage * tp + shard
    stage 1, layers …n  rank 2    rank 3        rank 0 leads: it runs in the engine process

A rank holds a smaller model (``shard_of``): fewer layers, fewer heads, a narrower MLP. The first stage has the
embedding, the last stage the final norm and the output projection; each shard of these has a range of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from pdserve.errors import ConfigError
from pdserve.kv.groups import KVHeads
from pdserve.kv.layout import DTYPE_BYTES, KVShare
from pdserve.kv.states import StateShare
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.eagle3 import Eagle3Config
from pdserve.model.model_config import ModelConfig
from pdserve.model.moe import MoEConfig


class ParallelConfig(msgspec.Struct, frozen=True):
    """``stage_layers[s]`` is the number of layers of pipeline stage s; each stage has ``tp`` tensor shards.

    ``ep`` is 1, or equals ``tp``: then each shard holds whole experts in place of a slice of every expert.
    """

    stage_layers: tuple[int, ...]
    tp: int = 1
    ep: int = 1

    @property
    def pp(self) -> int:
        return len(self.stage_layers)

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    def stage_of(self, layer: int) -> int:
        """Return the pipeline stage of a layer. The last stage has the layers behind the model's, which make drafts."""
        ends = accumulate(self.stage_layers[:-1])
        return next((stage for stage, end in enumerate(ends) if layer < end), self.pp - 1)

    def position(self, rank: int) -> RankPosition:
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        return RankPosition(self, *divmod(rank, self.tp))

    def shares(self, model: ModelConfig) -> tuple[KVShare, ...]:
        """Return each rank's part of the KV of ``model``. Layer numbers count only layers with a KV cache.

        The last stage has the layers that make drafts.
        """
        *others, last = self.kv_layers(model)
        kv_layers = (*others, last + model.num_draft_layers)
        positions = (self.position(rank) for rank in range(self.num_ranks))
        return tuple(
            KVShare.of_rank(
                position.stage, kv_layers, position.shard, self.tp, model.num_kv_heads, model.num_draft_layers
            )
            for position in positions
        )

    def state_shares(self, model: ModelConfig) -> tuple[StateShare, ...]:
        """Return each rank's part of the recurrent state of ``model``; empty if it has none."""
        if model.state is None:
            return ()
        counts = self.recurrent_layers(model)
        positions = (self.position(rank) for rank in range(self.num_ranks))
        return tuple(
            StateShare(sum(counts[: position.stage]), counts[position.stage], sum(counts), position.shard, self.tp)
            for position in positions
        )

    def kv_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the number of layers with a KV cache in each stage, without draft layers."""
        return tuple(model.kv_layers_in(self.position(stage * self.tp).layers) for stage in range(self.pp))

    def recurrent_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the number of layers with a recurrent state in each stage."""
        stages = (self.position(stage * self.tp).layers for stage in range(self.pp))
        return tuple(sum(map(model.is_recurrent, layers)) for layers in stages)


class RankPosition(msgspec.Struct, frozen=True):
    """The stage and shard of one rank."""

    parallel: ParallelConfig
    stage: int
    shard: int

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, shard {self.shard})"

    @property
    def rank(self) -> int:
        return self.stage * self.parallel.tp + self.shard

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the output projection, and samples."""
        return self.stage == self.parallel.pp - 1

    @property
    def layers(self) -> range:
        first = sum(self.parallel.stage_layers[: self.stage])
        return range(first, first + self.parallel.stage_layers[self.stage])

    def local_experts(self, moe: MoEConfig) -> range:
        """Return the experts of each layer that this rank holds, or holds a slice of."""
        if self.parallel.ep == 1:
            return range(moe.num_experts)
        count = moe.num_experts // self.parallel.ep
        return range(self.shard * count, (self.shard + 1) * count)


def choose_parallel_config(
    model: ModelConfig,
    pp: int,
    tp: int,
    stage_layers: Sequence[int] | None = None,
    ep: int = 1,
) -> ParallelConfig:
    """Check and choose the parallel configuration. Raises ConfigError.

    Without ``stage_layers``, stages get equal numbers of layers; earlier ones get the remaining layers, because the
    last stage also computes the logits.
    """
    if stage_layers is None:
        if not 1 <= pp <= model.num_layers:
            raise ConfigError(f"pp {pp} is not within 1 … {model.num_layers}, the layers of the model")
        least, over = divmod(model.num_layers, pp)
        stage_layers = [least + (stage < over) for stage in range(pp)]
    if len(stage_layers) != pp or min(stage_layers) < 1 or sum(stage_layers) != model.num_layers:
        raise ConfigError(
            f"stage layers {','.join(map(str, stage_layers))} add up to {sum(stage_layers)}; give {pp} numbers of at "
            f"least 1, one for each of pp stages, that add up to the {model.num_layers} layers of the model"
        )
    sizes = [("attention heads", model.num_heads), ("intermediate_size", model.intermediate_size)]
    _check_experts(model, tp, ep)
    if model.state is not None:
        sizes.append(model.state.divisible)
    if model.moe is not None:
        sizes.append(("intermediate size of experts", model.moe.intermediate_size * ep))
        sizes.append(("intermediate size of shared experts", model.moe.shared_intermediate_size))
    for what, count in sizes:
        if tp < 1 or count % tp:
            raise ConfigError(f"tp {tp} does not divide the model's {what}, {count}; choose a divisor")
    for num_kv_heads in {model.num_kv_heads, *(heads.num_kv_heads for heads in model.kv_heads)}:
        KVShare.of_rank(0, stage_layers, 0, tp, num_kv_heads)  # checks the KV heads
    if pp > 1 and any(source != layer for layer, source in enumerate(model.kv_sources)):
        raise ConfigError(
            f"pp {pp}: some layers of {model.architecture} read the KV of other layers, which must be on the same "
            "stage; use --tp in place of --pp"
        )
    if pp > 1 and model.gemma4 is not None and model.gemma4.size_per_layer:
        raise ConfigError(
            f"pp {pp}: layers of {model.architecture} read embeddings of token ids, which only the first stage has; "
            "use --tp in place of --pp"
        )
    parallel = ParallelConfig(tuple(stage_layers), tp, ep)
    _check_kinds(model, parallel)
    return parallel


def _check_kinds(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError unless each stage of a model with recurrent layers has one, and a layer that attends."""
    if model.state is None:
        return
    counts = zip(parallel.recurrent_layers(model), parallel.kv_layers(model), strict=True)
    for stage, (recurrent, kv) in enumerate(counts):
        if not (recurrent and kv):
            kind = "that attends" if kv == 0 else "with recurrent state"
            layers = parallel.position(stage * parallel.tp).layers
            attending = ", ".join(map(str, model.kv_layers[:8])) + (" …" if len(model.kv_layers) > 8 else "")
            others = "others may be recurrent" if model.attends else "the others are recurrent"
            raise ConfigError(
                f"stage {stage} has layers {layers.start} … {layers[-1]} and none {kind}; each stage needs both kinds. "
                f"Layers {attending} attend, {others}: choose --stage-layers so, or a smaller --pp"
            )


def _check_experts(model: ModelConfig, tp: int, ep: int) -> None:
    if ep == 1:
        return
    if model.moe is None:
        raise ConfigError(f"ep {ep}: {model.architecture} has no native mixture of experts; leave --ep out")
    if ep != tp:
        raise ConfigError(f"ep {ep} differs from tp {tp}; the shards of a stage divide its experts: use --ep {tp}")
    if model.moe.num_experts % ep:
        raise ConfigError(f"ep {ep} does not divide the model's experts, {model.moe.num_experts}; choose a divisor")


def shard_of(model: ModelConfig, position: RankPosition) -> ModelConfig:
    """Return a rank's part as a model: its layers, its heads, its part of the MLP. The vocabulary stays full."""
    tp = position.parallel.tp
    layers = position.layers
    num_drafting = model.num_draft_layers if position.is_last else 0
    return msgspec.structs.replace(
        model,
        num_layers=len(layers),
        num_draft_layers=num_drafting,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        intermediate_size=model.intermediate_size // tp,
        moe=None if model.moe is None else _shard_of_experts(model.moe, position),
        attention=_attention_of(model, layers, num_drafting),
        kv_heads=_heads_of(model, position, num_drafting),
        recurrent=model.recurrent[layers.start : layers.stop],
        attends=model.attends[layers.start : layers.stop],
        state=None if model.state is None else model.state.split(tp),
    )


def _attention_of(model: ModelConfig, layers: range, num_drafting: int) -> tuple[AttentionSpec, ...]:
    first = sum(map(model.is_attending, range(layers.start)))
    count = sum(map(model.is_attending, layers))
    return model.attention[first : first + count + num_drafting]


def _heads_of(model: ModelConfig, position: RankPosition, num_drafting: int) -> tuple[KVHeads, ...]:
    """Return the unlike KV heads of a rank's layers; empty if the model has none."""
    first = model.kv_layers_in(range(position.layers.start))
    held = model.kv_heads[first : first + model.kv_layers_in(position.layers) + num_drafting]
    return tuple(KVHeads(max(1, heads.num_kv_heads // position.parallel.tp), heads.head_dim) for heads in held)


def _shard_of_experts(moe: MoEConfig, position: RankPosition) -> MoEConfig:
    tp = position.parallel.tp
    ep = position.parallel.ep
    layers = position.layers
    return msgspec.structs.replace(
        moe,
        num_experts=len(position.local_experts(moe)),
        intermediate_size=moe.intermediate_size * ep // tp,
        shared_intermediate_size=moe.shared_intermediate_size // tp,
        dense_layers=tuple(layer - layers.start for layer in moe.dense_layers if layer in layers),
    )


def vocabulary_of(model: ModelConfig, position: RankPosition) -> range:
    """Return the token ids whose embedding and output rows a shard holds; the last shard may hold fewer."""
    size = -(-model.vocab_size // position.parallel.tp)
    return range(position.shard * size, min((position.shard + 1) * size, model.vocab_size))


def num_parameters(model: ModelConfig, position: RankPosition) -> int:
    """Count a rank's parameters without norms and biases; a tied output projection counts beside the embedding."""
    return _library_parameters(model, position) or sum(_parameters(model, position))


def active_parameters(model: ModelConfig, position: RankPosition) -> int:
    """Count the parameters that a token uses: ``num_parameters`` less the experts that its router does not choose."""
    return _library_parameters(model, position) or sum(_parameters(model, position, active=True))


def weight_bytes(model: ModelConfig, position: RankPosition, dtype: str) -> int:
    """Return the bytes of a rank's weights: linear layers in the model's weight format, the rest in ``dtype``."""
    if model.num_weights:
        return _library_parameters(model, position) * DTYPE_BYTES[dtype]
    linear, experts, tables = _parameters(model, position)
    rest = tables * DTYPE_BYTES[dtype]
    if model.head_form is not None and position.is_last:
        head = len(vocabulary_of(model, position)) * model.hidden_size
        rest -= int(head * (DTYPE_BYTES[dtype] - model.head_form.bytes_per_weight))
    if model.linear_bytes or model.expert_bytes:
        return int(linear * model.linear_bytes + experts * model.expert_bytes) + rest
    return model.linear_format.num_bytes(linear, experts, dtype) + rest


def _library_parameters(model: ModelConfig, position: RankPosition) -> int:
    """Estimate a rank's part of ``num_weights``: layers of equal size, and a table more in the first and last stage."""
    parallel = position.parallel
    num_tables = position.is_first + position.is_last if parallel.pp > 1 else 0
    of_stage = model.num_weights * len(position.layers) // model.num_layers
    return (of_stage + num_tables * model.vocab_size * model.hidden_size) // parallel.tp if model.num_weights else 0


def _parameters(model: ModelConfig, position: RankPosition, active: bool = False) -> tuple[int, int, int]:
    """Count the weights of linear layers, of the ``active`` or all experts, and of tables and routers."""
    mine = shard_of(model, position)
    head = 0
    if model.draft_head is not None and mine.num_draft_layers:
        head = _head_parameters(model, model.draft_head, position)
        mine = msgspec.structs.replace(mine, num_draft_layers=0)
    layers = [*position.layers, *range(model.num_layers, model.num_layers + mine.num_draft_layers)]
    mixers = _mixer_parameters(mine)
    num_tables = position.is_first + position.is_last
    if mine.num_draft_layers and not position.is_first:
        num_tables += 1  # the embedding
    tables = num_tables * len(vocabulary_of(model, position)) * mine.hidden_size
    tables += head + mine.num_draft_layers * 2 * mine.hidden_size**2  # projections of embeddings and hidden states
    factors = 3 if model.has_gates else 2  # weight matrices of an MLP or expert
    dense = factors * mine.hidden_size * mine.intermediate_size
    num_mlps = sum(map(model.has_mlp, layers))
    moe = mine.moe
    if mine.gemma4 is not None and (size := mine.gemma4.size_per_layer):
        mixers += len(layers) * 3 * mine.hidden_size * size
        tables += len(vocabulary_of(model, position)) * len(layers) * size
    if mine.gemma4 is not None and mine.gemma4.wide_mlp:
        mixers += sum(not model.has_kv(layer) for layer in layers) * dense
    if moe is None or model.moe is None:
        return mixers + num_mlps * dense, 0, tables
    num_moe = sum(not model.moe.is_dense(layer) for layer in layers)
    num_dense = num_mlps - num_moe
    used = min(moe.top_k, moe.num_experts) if active else moe.num_experts
    expert = factors * mine.hidden_size * moe.intermediate_size
    shared = factors * mine.hidden_size * moe.shared_intermediate_size
    routers = num_moe * model.moe.num_experts * mine.hidden_size
    linear = mixers + num_dense * dense + num_moe * shared
    return linear, num_moe * used * expert, tables + routers


def _head_parameters(model: ModelConfig, head: Eagle3Config, position: RankPosition) -> int:
    """Count a rank's weights of the head that makes drafts, with a copy of the model's embedding where it needs one."""
    tp = position.parallel.tp
    size = head.hidden_size
    embedding = model.vocab_size * size if head.has_embedding or not position.is_first else 0
    # Queries, keys and values take the embedding beside the hidden state: 2 * size inputs.
    attention = (3 * model.num_heads + 2 * 2 * max(model.num_kv_heads, tp)) * model.head_dim * size
    split = attention + 3 * size * head.intermediate_size + embedding + head.draft_vocab_size * size
    return split // tp + len(head.layers) * model.hidden_size * size


def _mixer_parameters(mine: ModelConfig) -> int:
    """Count the weights of linear layers in attention, and in recurrent layers, of a rank's part of a model."""
    kv_layers = mine.num_kv_layers
    if mine.latent is not None:
        return kv_layers * mine.latent.num_weights(mine.hidden_size, mine.num_heads)
    if mine.kv_heads:
        return _unlike_heads_parameters(mine)
    heads = (3 if mine.has_output_gate else 2) * mine.num_heads + 2 * mine.num_kv_heads
    attention = kv_layers * mine.hidden_size * mine.head_dim * heads
    if (state := mine.state) is None:
        return attention
    return attention + mine.num_recurrent * state.num_weights(mine.hidden_size)


def _unlike_heads_parameters(mine: ModelConfig) -> int:
    """Count the weights of linear layers in attention of a rank's part of a model with unlike KV heads."""
    size = 0  # rows of all projections
    for layer in range(mine.num_layers):
        if mine.is_recurrent(layer):
            continue
        heads = mine.heads_of(layer)
        one_projection = mine.gemma4 is not None and mine.gemma4.projects_once(mine.attention[layer])
        size += 2 * mine.num_heads * heads.head_dim
        size += (1 if one_projection else 2) * heads.size * mine.has_kv(layer)
    return size * mine.hidden_size
