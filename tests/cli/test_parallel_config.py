"""Splitting a model over ranks: the ranks together hold it all, and impossible sizes are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.parallel import (
    ParallelConfig,
    active_parameters,
    choose_parallel_config,
    num_parameters,
    shard_of,
    vocabulary_of,
)
from pdserve.errors import ConfigError
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig, load_model_config
from pdserve.model.moe import MoEConfig

TINY = load_model_config(Path(__file__).parents[2] / "models" / "tiny")


MOE = MoEConfig(num_experts=8, top_k=2, intermediate_size=30, shared_intermediate_size=8, dense_layers=(0,))


def model(layers: int = 8, heads: int = 8, kv_heads: int = 4, intermediate: int = 64, vocab: int = 101) -> ModelConfig:
    return msgspec.structs.replace(
        TINY,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        attention=tuple(AttentionSpec(scale=1.0, window=layer) for layer in range(layers)),
    )


@pytest.mark.parametrize(
    ("pp", "tp", "stage_layers", "named"),
    [
        (9, 1, None, ["pp 9", "1 … 8"]),
        (0, 1, None, ["pp 0", "1 … 8"]),
        (2, 1, (4, 5), ["4,5", "8 layers"]),
        (2, 1, (8, 0), ["8,0", "at least 1"]),
        (2, 1, (8,), ["stage layers 8", "2 numbers"]),
        (1, 3, None, ["tp 3", "attention heads, 8", "divisor"]),
        (1, 16, None, ["tp 16", "attention heads, 8"]),
        (1, 0, None, ["tp 0"]),
    ],
)
def test_impossible_parallel_sizes_are_refused(
    pp: int, tp: int, stage_layers: tuple[int, ...] | None, named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_parallel_config(model(), pp, tp, stage_layers)
    assert all(text in str(refused.value) for text in named), refused.value


def test_head_counts_that_do_not_fit_tp_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 KV heads cannot be spread over 4"):
        choose_parallel_config(model(heads=12, kv_heads=6), 1, 4)
    with pytest.raises(ConfigError, match="intermediate_size, 62"):
        choose_parallel_config(model(intermediate=62), 1, 4)


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelConfig, ParallelConfig]:
    layers = draw(st.integers(1, 12))
    kv_heads = 2 ** draw(st.integers(0, 3))
    tp = 2 ** draw(st.integers(0, 3))
    of = model(layers, 8, kv_heads, vocab=draw(st.integers(8, 300)))
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    listed = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True))
    by_count = draw(st.booleans())
    return of, choose_parallel_config(of, len(listed), tp, None if by_count else listed)


@given(splits())
def test_ranks_together_hold_the_whole_model(chosen: tuple[ModelConfig, ParallelConfig]) -> None:
    of, parallel = chosen
    positions = [parallel.position(rank) for rank in range(parallel.num_ranks)]
    assert [position.rank for position in positions] == list(range(parallel.num_ranks))
    layers = Counter(layer for position in positions for layer in position.layers)
    assert layers == dict.fromkeys(range(of.num_layers), parallel.tp)
    for stage in range(parallel.pp):
        shards = [position for position in positions if position.stage == stage]
        words = [word for position in shards for word in vocabulary_of(of, position)]
        assert words == list(range(of.vocab_size))
        assert sum(shard_of(of, position).num_heads for position in shards) == of.num_heads
        assert sum(shard_of(of, position).intermediate_size for position in shards) == of.intermediate_size
    for position in positions:
        assert [spec.window for spec in shard_of(of, position).attention] == [*position.layers]
    assert sum(position.is_first for position in positions) == parallel.tp
    assert sum(position.is_last for position in positions) == parallel.tp


@given(splits())
def test_each_head_of_each_layer_is_on_as_many_ranks_as_replicas(
    chosen: tuple[ModelConfig, ParallelConfig],
) -> None:
    of, parallel = chosen
    held: Counter[tuple[int, int]] = Counter()
    for rank, share in enumerate(parallel.shares(of)):
        mine = shard_of(of, parallel.position(rank))
        assert (share.num_layers, share.num_heads) == (mine.num_layers, mine.num_kv_heads)
        for layer in range(share.first_layer, share.first_layer + share.num_layers):
            held.update((layer, head) for head in range(share.first_head, share.first_head + share.num_heads))
    replicas = max(1, parallel.tp // of.num_kv_heads)
    everything = [(layer, head) for layer in range(of.num_layers) for head in range(of.num_kv_heads)]
    assert held == dict.fromkeys(everything, replicas)


@pytest.mark.parametrize(("layers", "pp", "stages"), [(8, 3, (3, 3, 2)), (8, 4, (2, 2, 2, 2)), (7, 4, (2, 2, 2, 1))])
def test_first_stages_take_the_remaining_layers(layers: int, pp: int, stages: tuple[int, ...]) -> None:
    assert choose_parallel_config(model(layers), pp, 1).stage_layers == stages


@pytest.mark.parametrize(
    ("tp", "ep", "is_moe", "named"),
    [
        (2, 2, False, "no native mixture of experts"),
        (4, 2, True, "ep 2 differs from tp 4.*use --ep 4"),
        (4, 1, True, "intermediate size of experts, 30"),
    ],
)
def test_impossible_expert_parallel_sizes_are_refused(tp: int, ep: int, is_moe: bool, named: str) -> None:
    of = msgspec.structs.replace(model(), moe=MOE if is_moe else None)
    with pytest.raises(ConfigError, match=named):
        choose_parallel_config(of, 1, tp, ep=ep)


def test_experts_are_sliced_or_divided_among_shards() -> None:
    of = msgspec.structs.replace(model(kv_heads=8, vocab=100), moe=MOE)
    whole = choose_parallel_config(of, 1, 1).position(0)
    routers = (of.num_layers - 1) * MOE.num_experts * of.hidden_size  # parameters; every shard has them
    for tp, ep in ((2, 1), (2, 2), (4, 4)):
        parallel = choose_parallel_config(of, 1, tp, ep=ep)
        ranks = [parallel.position(rank) for rank in range(tp)]
        held = sum(num_parameters(of, position) for position in ranks)
        assert held - (tp - 1) * routers == num_parameters(of, whole)
        experts = [expert for position in ranks for expert in position.local_experts(MOE)]
        assert sorted(experts) == sorted(list(range(8)) * (tp // ep))
    assert active_parameters(of, whole) < num_parameters(of, whole)


def test_rank_parameters_add_up_to_the_model_without_norms() -> None:
    of = model(kv_heads=8, vocab=100)
    parallel = choose_parallel_config(of, 2, 4)
    alone = num_parameters(of, choose_parallel_config(of, 1, 1).position(0))
    assert sum(num_parameters(of, parallel.position(rank)) for rank in range(parallel.num_ranks)) == alone
