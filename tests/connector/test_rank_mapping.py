"""Rank mapping and block slicing between nodes of any two shapes; refusals of peers that do not fit."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from kv_ranks import Model, Node, PackedSpec, node, packed
from numpy.typing import NDArray

from connector.planning.rank_mapping import LocalRank, SourceRank
from connector.planning.transfer_plan import plan_read
from pdserve.errors import ConfigError, PeerError
from pdserve.kv.groups import KVCacheGroups, cut_into_groups
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion, KVShare, LatentSpec
from pdserve.records import KVRead, Peer, RankKV

EMPTY = -1
PADDING = -2
ROW_BYTES = 4  # head_dim 2 in float16
MODEL = Model(num_heads=4, block_size=4, head_dim=2, dtype="float16")
OURS = node(MODEL, (2,), 1, 4, [40])
LAYOUT = OURS.layouts[0]


class Case(NamedTuple):
    model: Model
    num_layers: int
    ours: Node
    theirs: Node


def source_ranks(node: Node, rank: int, peer: Peer) -> tuple[SourceRank, ...]:
    return LocalRank(tuple(node.shares), rank).source_ranks(node.layouts[rank], peer)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def nodes(draw: st.DrawFn, model: Model, num_layers: int) -> Node:
    """Any number of stages of any length; shards that split or repeat the heads."""
    cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=2)) if num_layers > 1 else set()
    stage_layers = [end - start for start, end in pairwise([0, *sorted(cuts), num_layers])]
    num_shards = draw(st.sampled_from([*divisors(model.num_heads), 2 * model.num_heads, 4 * model.num_heads]))
    page = draw(st.sampled_from(divisors(model.block_size)))
    num_blocks = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return node(model, stage_layers, num_shards, page, num_blocks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    specs: list[type[FullAttentionSpec | LatentSpec]] = [FullAttentionSpec, LatentSpec]
    spec = draw(st.sampled_from(specs))
    num_layers = draw(st.integers(1, 6))
    windows = draw(st.lists(st.sampled_from([None, None, 8, 20]), min_size=num_layers, max_size=num_layers))
    groups = cut_into_groups(windows)
    model = Model(draw(st.integers(1, 6)), draw(st.sampled_from([1, 4, 6, 12])), 2, "float16", spec, groups)
    return Case(model, num_layers, draw(nodes(model, num_layers)), draw(nodes(model, num_layers)))


def blocks_of(draw: st.DataObject, layouts: list[KVLayout], remote: list[KVLayout]) -> KVRead:
    """Any local blocks in any order from any remote blocks, with runs of adjacent blocks."""
    num_local, num_remote = (min(layout.num_blocks for layout in side) for side in (layouts, remote))
    local = draw.draw(st.permutations(range(num_local)))[: draw.draw(st.integers(0, num_local))]
    shift = draw.draw(st.integers(0, num_remote - 1))
    ids = draw.draw(st.sampled_from([[(b + shift) % num_remote for b in local], local[::-1]]))
    num_groups = layouts[0].groups.num_groups
    groups = draw.draw(st.lists(st.integers(0, num_groups - 1), min_size=len(local), max_size=len(local)))
    remote_ids = tuple(b % num_remote for b in ids)
    of_remote = dict[int, int]()
    groups = [of_remote.setdefault(block, group) for block, group in zip(remote_ids, groups, strict=True)]
    return KVRead(1, "e1", tuple(local), remote_ids, tuple(groups) if num_groups > 1 else ())


def groups_of_blocks(layout: KVLayout, blocks: tuple[int, ...], groups: tuple[int, ...]) -> list[int]:
    """Return the group of each block of a cache; 0 for blocks that a read does not name."""
    group_of = dict(zip(blocks, groups, strict=False))
    return [group_of.get(block, 0) for block in range(layout.num_blocks)]


def cells_of(case: Case) -> NDArray[Any]:
    """The peer's KV; each byte has its own number."""
    num_blocks = max(layout.num_blocks for layout in case.theirs.layouts)
    shape = (
        num_blocks,
        case.model.num_heads,
        case.num_layers,
        case.model.spec.planes,
        case.model.block_size,
        ROW_BYTES,
    )
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


@examples(200)
@given(cases(), st.data(), st.integers(1, 4000))
def test_each_wanted_byte_lands_once_and_no_other_byte_does(case: Case, draw: st.DataObject, limit: int) -> None:
    _, _, ours, theirs = case
    rank = draw.draw(st.integers(0, len(ours.layouts) - 1))
    layout = ours.layouts[rank]
    share = ours.shares[rank]
    read = blocks_of(draw, [layout], theirs.layouts)
    cells = cells_of(case)
    memory = np.full(layout.total_bytes, EMPTY, dtype=np.int64)
    for source in source_ranks(ours, rank, Peer("node", "e1", theirs.ranks)):
        its_groups = groups_of_blocks(source.rank.layout, read.remote_blocks, read.groups)
        remote = packed(cells, source.rank.layout, source.rank.part, its_groups, PADDING)
        assert len(remote) == source.rank.layout.total_bytes
        for chunk in plan_read(read, source.slices, limit):
            ranges = source.slices[chunk.number].byte_ranges(chunk.local, chunk.remote)
            assert chunk.num_ranges == len(ranges.local)
            assert ranges.num_bytes.sum() <= max(limit, source.slices[chunk.number].num_bytes)
            for at, origin, count in zip(*(column.tolist() for column in ranges), strict=True):
                assert 0 <= at < at + count <= len(memory)
                assert 0 <= origin < origin + count <= len(remote)
                assert (memory[at : at + count] == EMPTY).all(), "a byte is written twice"
                memory[at : at + count] = remote[origin : origin + count]
    expected = np.full((layout.num_blocks, *cells.shape[1:]), EMPTY, dtype=np.int64)
    for mine, its in zip(read.local_blocks, read.remote_blocks, strict=True):
        expected[mine] = cells[its]
    wanted = packed(expected, layout, share, groups_of_blocks(layout, read.local_blocks, read.groups), PADDING)
    assert ((memory == wanted) | (wanted == PADDING)).all()
    written = (memory != EMPTY).reshape(layout.num_blocks, -1).any(axis=1).nonzero()[0]  # padding, too
    assert set(written.tolist()) <= set(read.local_blocks)


@given(cases(), st.data())
def test_all_adjacent_ranges_are_merged(case: Case, draw: st.DataObject) -> None:
    rank = draw.draw(st.integers(0, len(case.ours.layouts) - 1))
    layout = case.ours.layouts[rank]
    read = blocks_of(draw, [layout], case.theirs.layouts)
    for source in source_ranks(case.ours, rank, Peer("node", "e1", case.theirs.ranks)):
        for chunk in plan_read(read, source.slices, layout.total_bytes):
            ranges = source.slices[chunk.number].byte_ranges(chunk.local, chunk.remote)
            order = np.argsort(ranges.local)  # adjacent ranges become neighbours
            local, remote, count = (column[order] for column in ranges)
            together = (local[:-1] + count[:-1] == local[1:]) & (remote[:-1] + count[:-1] == remote[1:])
            assert not together.any()


@given(cases(), st.data())
def test_descriptors_are_the_ranges_before_merging(case: Case, draw: st.DataObject) -> None:
    rank = draw.draw(st.integers(0, len(case.ours.layouts) - 1))
    for source in source_ranks(case.ours, rank, Peer("node", "e1", case.theirs.ranks)):
        for side in chain.from_iterable(source.slices):
            prepared = [b * side.block_bytes + offset for offset in side.offsets for b in range(side.num_blocks)]
            blocks = np.array(draw.draw(st.permutations(range(side.num_blocks))), np.int32)
            assert [prepared[number] for number in side.descriptors(blocks)] == side.starts(blocks).tolist()


@given(cases())
def test_readers_of_a_replicated_head_are_spread_evenly(case: Case) -> None:
    peer = Peer("node", "e1", case.theirs.ranks)
    readers = dict.fromkeys([rank.agent for rank in peer.ranks], 0)
    for rank in range(len(case.ours.layouts)):
        for source in source_ranks(case.ours, rank, peer):
            readers[source.rank.agent] += 1
    for share in case.theirs.shares:
        counts = [readers[rank.agent] for rank in peer.ranks if rank.part == share]
        assert max(counts) - min(counts) <= 1


def shape(num_shards: int, stage_layers: tuple[int, ...] = (4,), page: int = 64) -> Node:
    """64-token blocks of a model with 4 layers and 4 KV heads."""
    return node(Model(4, 64, 2, "float16"), stage_layers, num_shards, page, [4])


@pytest.mark.parametrize(
    ("ours", "theirs", "num_sources", "num_ranges"),
    [
        (shape(1), shape(1), 1, 1),
        (shape(2, (1, 3), 16), shape(2, (1, 3), 16), 1, 1),
        (shape(1), shape(2), 2, 1),  # half of the heads of a page
        (shape(1, page=16), shape(2, page=16), 2, 4),  # half of the heads, 4 pages
        (shape(2), shape(1), 1, 1),
        (shape(8), shape(8), 1, 1),  # replicated heads
        (shape(1), shape(8), 4, 1),
        (shape(1), shape(1, (1, 3)), 2, 4),  # a range per head
        (shape(1, (2, 2)), shape(1), 1, 4),
        (shape(1, page=64), shape(1, page=16), 1, 4 * 4 * 4 * 2),  # pages, heads, layers, K and V
        (shape(4, (1,) * 4, 16), shape(1), 1, 4 * 2),
    ],
)
def test_blocks_have_as_few_ranges_as_possible(ours: Node, theirs: Node, num_sources: int, num_ranges: int) -> None:
    sources = source_ranks(ours, 0, Peer("node", "e1", theirs.ranks))
    assert [source.num_ranges for source in sources] == [num_ranges] * num_sources


@pytest.mark.parametrize(("here", "there", "other"), [(1, 0, False), (0, 1, False), (1, 1, False), (1, 1, True)])
def test_layers_that_make_drafts_are_read_if_both_nodes_have_the_same(here: int, there: int, other: bool) -> None:
    """Layer 2 of three makes drafts."""
    model = Model(4, 64, 2, "float16")
    ours, theirs = (node(model, (2 + drafting,), 1, 64, [4], drafting) for drafting in (here, there))
    (source,) = source_ranks(ours, 0, Peer("node", "e1", theirs.ranks, other_drafts=other))
    (slices,) = source.slices
    layout = ours.layouts[0]
    drafting = 0 if other else min(here, there)
    assert slices.num_bytes == layout.block_bytes // layout.num_layers * (2 + drafting)


# ---------------------------------------------------------------- refusals


def rank_of(layout: KVLayout, share: KVShare | None = None) -> RankKV:
    return RankKV("agent", b"", KVRegion(4096, max(1, layout.total_bytes), "cpu", 0), layout, share)


def with_field(layout: KVLayout, field: str, value: object) -> KVLayout:
    """The layout with another value of a field of its own or of its spec."""
    if field in KVLayout.__struct_fields__:
        return msgspec.structs.replace(layout, **{field: value})
    return msgspec.structs.replace(layout, spec=msgspec.structs.replace(layout.spec, **{field: value}))


def refused(*ranks: RankKV) -> str:
    with pytest.raises(PeerError) as error:
        source_ranks(OURS, 0, Peer("node", "e1", ranks))
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 8), ("head_dim", 64), ("dtype", "bfloat16"), ("num_layers", 3), ("num_kv_heads", 3)],
)
def test_unequal_field_is_refused_with_both_values(field: str, value: object) -> None:
    theirs = with_field(LAYOUT, field, value)
    assert f"{field}: {getattr(LAYOUT, field)} here, {value} at the peer" in refused(rank_of(theirs))


def test_heads_of_the_models_are_compared_not_of_ranks() -> None:
    theirs = node(Model(8, 4, 2, "float16"), (2,), 2, 4, [4])  # 4 heads per rank, as on our rank
    assert "num_kv_heads: 4 here, 8 at the peer" in refused(*theirs.ranks)


def test_unequal_groups_are_refused_with_both_values() -> None:
    groups = KVCacheGroups((None, 8), (0, 1))
    theirs = msgspec.structs.replace(LAYOUT, groups=groups, num_layers=1)
    message = refused(rank_of(theirs))
    assert "kv_groups: all layers of full here, 1 layers of full, 1 layers of 8 at the peer" in message


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31])
def test_an_impossible_number_of_blocks_is_refused(num_blocks: int) -> None:
    assert str(num_blocks) in refused(rank_of(msgspec.structs.replace(LAYOUT, num_blocks=num_blocks)))


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads"])
def test_a_rank_without_layers_or_heads_is_refused(field: str) -> None:
    assert "no part of a model" in refused(rank_of(with_field(LAYOUT, field, 0)))


def test_a_region_too_small_for_its_blocks_is_refused() -> None:
    rank = rank_of(LAYOUT)
    small = msgspec.structs.replace(rank.region, num_bytes=LAYOUT.total_bytes - 1)
    assert str(LAYOUT.total_bytes - 1) in refused(msgspec.structs.replace(rank, region=small))


def test_a_rank_with_another_layout_than_its_share_is_refused() -> None:
    assert "(2, 4)" in refused(rank_of(LAYOUT, KVShare(0, 1, 0, 4, 2, 4)))


@pytest.mark.parametrize("missing", range(4))
def test_a_gap_between_the_peers_ranks_is_refused(missing: int) -> None:
    ranks = node(MODEL, (1, 1), 2, 4, [4]).ranks
    assert "held by 0 different shares" in refused(*ranks[:missing], *ranks[missing + 1 :])


def test_a_peer_without_ranks_is_refused() -> None:
    assert "0 ranks" in refused()


def test_ranks_that_overlap_are_refused() -> None:
    half = node(MODEL, (2,), 2, 4, [4]).ranks[1]
    assert "layer 0 of KV head 2 is held by 2 different shares" in refused(rank_of(LAYOUT), half)


def test_too_many_descriptors_are_refused_with_both_page_sizes() -> None:
    theirs = msgspec.structs.replace(LAYOUT, num_blocks=2**27, kernel_block_size=2)
    message = refused(rank_of(theirs))
    assert "kernel_block_size: 4 here, 2 at the peer" in message


def test_ranks_with_equal_names_are_refused() -> None:
    rank = rank_of(LAYOUT)
    assert f"2 ranks of peer node say they are {rank.agent}" in refused(rank, rank)


def test_a_refusal_names_its_rank() -> None:
    ranks = node(MODEL, (1, 1), 1, 4, [4]).ranks
    larger = msgspec.structs.replace(ranks[1].layout, num_blocks=5)
    assert refused(ranks[0], msgspec.structs.replace(ranks[1], layout=larger)).startswith("rank 1: 5 blocks")


# ---------------------------------------------------------------- specs


def packed_node(page: int, stage_layers: tuple[int, ...] = (2,), num_shards: int = 1) -> Node:
    return node(Model(4, page, 2, "float16", PackedSpec), stage_layers, num_shards, page, [4])


def test_equal_packed_blocks_are_one_range() -> None:
    (source,) = source_ranks(packed_node(16), 0, Peer("node", "e1", packed_node(16).ranks))
    assert (source.num_ranges, source.slices[0].num_bytes) == (1, packed_node(16).layouts[0].block_bytes)


def test_keys_and_latents_of_equal_sizes_are_not_exchanged() -> None:
    keys, latents = (
        node(Model(1, 16, 576, "bfloat16", spec), (2,), 1, 16, [4]) for spec in (FullAttentionSpec, LatentSpec)
    )
    with pytest.raises(PeerError, match="kv_cache: latent here, full_attention at the peer"):
        source_ranks(latents, 0, Peer("node", "e1", keys.ranks))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (packed_node(32), "kernel_block_size: 16 here, 32 at the peer"),
        (packed_node(16, (1, 1)), "2 layers from 0, 4 heads from 0 here, 1 layers from 0, 4 heads from 0 at the peer"),
        (packed_node(16, num_shards=2), "4 heads from 0 here, 2 layers from 0, 2 heads from 0 at the peer"),
        (node(Model(4, 16, 2, "float16"), (2,), 1, 16, [4]), "kv_cache: packed here, full_attention at the peer"),
    ],
)
def test_packed_blocks_are_never_split(theirs: Node, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        source_ranks(packed_node(16), 0, Peer("node", "e1", theirs.ranks))


def test_a_packed_layout_with_several_pages_per_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernel_block_size 16 must equal block_size 32"):
        KVLayout(4, 32, 16, 2, PackedSpec(4, 2, "float16"))


def test_sizes_in_bytes_follow_from_the_planes_of_the_spec() -> None:
    layout = KVLayout(4, 32, 16, 3, LatentSpec(1, 576, "bfloat16"))
    assert layout.shape == (8, 1, 3, 1, 16, 576)
    assert (layout.bytes_per_token, layout.block_bytes) == (3 * 576 * 2, 32 * 3 * 576 * 2)


# ---------------------------------------------------------------- shares


def test_heads_are_split_or_repeated() -> None:
    def heads(num_shards: int) -> list[tuple[int, int]]:
        shares = [KVShare.of_rank(0, (3,), shard, num_shards, 4) for shard in range(num_shards)]
        return [(share.first_head, share.num_heads) for share in shares]

    assert heads(1) == [(0, 4)]
    assert heads(2) == [(0, 2), (2, 2)]
    assert heads(8) == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize(("total_heads", "num_shards"), [(4, 3), (6, 4), (4, 6)])
def test_shards_that_neither_split_nor_repeat_the_heads_are_refused(total_heads: int, num_shards: int) -> None:
    with pytest.raises(ConfigError, match=f"{total_heads} KV heads cannot be spread over {num_shards} tensor shards"):
        KVShare.of_rank(0, (3,), 0, num_shards, total_heads)


@pytest.mark.parametrize("share", [(-1, 1, 0, 1), (0, 0, 0, 1), (1, 2, 0, 1), (0, 1, 2, 1), (0, 1, 0, 3)])
def test_a_share_outside_of_the_model_is_refused(share: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="no part of a model"):
        KVShare(*share, total_layers=2, total_heads=2)
