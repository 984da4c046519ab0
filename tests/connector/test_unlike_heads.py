"""Layers with unlike KV heads: groups, layouts, reads between nodes of any two shapes, and digests of their blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from fast_set import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from kv_ranks import Node
from numpy.typing import NDArray

from connector.planning.rank_mapping import LocalRank
from connector.planning.transfer_plan import plan_read
from pdserve.errors import ConfigError, PeerError
from pdserve.kv.groups import KVCacheGroups, KVHeads, cut_into_groups
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVShare
from pdserve.records import DigestOrder, KVRead, Peer
from pdserve.rpc.field_ranges import check_message
from pdserve.rpc.protobuf import rank_from_pb, rank_to_pb
from runner.kv_cache import KVCache
from runner.kv_digest import KVDigester

ELEMENT = 2  # bytes: float16
EMPTY = -1


class Case(NamedTuple):
    groups: KVCacheGroups
    block_size: int
    ours: Node
    theirs: Node


def node(
    groups: KVCacheGroups, block_size: int, stage_layers: list[int], num_shards: int, page: int, num_blocks: int
) -> Node:
    finest = groups.finest
    shares = [
        KVShare.of_rank(stage, stage_layers, shard, num_shards, finest.num_kv_heads)
        for stage in range(len(stage_layers))
        for shard in range(num_shards)
    ]
    layouts = [
        KVLayout(
            num_blocks,
            block_size,
            page,
            groups.block_layers(share.layers, share.num_heads),
            FullAttentionSpec(share.num_heads, finest.head_dim, "float16"),
            groups,
        )
        for share in shares
    ]
    return Node(layouts, shares)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layers of two or three kinds of heads, with windows or without, on two nodes of any stages, shards and pages."""
    most = draw(st.sampled_from([1, 2, 4, 6]))
    counts = [count for count in range(1, most + 1) if most % count == 0]
    kinds = [
        (draw(st.sampled_from([None, 8, 20])), KVHeads(draw(st.sampled_from(counts)), draw(st.sampled_from([2, 4, 6]))))
        for _ in range(draw(st.integers(2, 3)))
    ]
    num_layers = draw(st.integers(2, 7))
    layers = [draw(st.sampled_from(kinds)) for _ in range(num_layers)]
    used = [heads for _, heads in layers]
    most_used = max(heads.num_kv_heads for heads in used)
    assume(len(set(used)) > 1 and all(most_used % heads.num_kv_heads == 0 for heads in used))
    groups = cut_into_groups([window for window, _ in layers], used)
    block_size = draw(st.sampled_from([4, 6]))
    nodes = []
    for _ in range(2):
        cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=2))
        stage_layers = [end - start for start, end in pairwise([0, *sorted(cuts), num_layers])]
        shards = [
            count
            for count in (1, 2, 3, 4, 6, 8, 12)
            if all(not (heads.num_kv_heads % count and count % heads.num_kv_heads) for heads in groups.heads)
        ]
        page = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6) if block_size % size == 0]))
        nodes.append(node(groups, block_size, stage_layers, draw(st.sampled_from(shards)), page, 5))
    return Case(groups, block_size, *nodes)


Cells = dict[int, NDArray[Any]]  # by layer: [blocks, heads of the layer, planes, block_size, bytes of a row]


def cells_of(groups: KVCacheGroups, block_size: int, num_blocks: int) -> Cells:
    """The KV of a model, each byte with its own number."""
    cells = {}
    before = 0
    for layer, group in enumerate(groups.layers):
        heads = groups.heads[group]
        shape = (num_blocks, heads.num_kv_heads, 2, block_size, heads.head_dim * ELEMENT)
        cells[layer] = np.arange(before, before + np.prod(shape)).reshape(shape)
        before += cells[layer].size
    return cells


def memory_of(cells: Cells, layout: KVLayout, share: KVShare, groups: list[int]) -> NDArray[Any]:
    """Return the memory of a rank by plain indexing: page after page, in it head after head of the block's group."""
    memory = np.full(layout.total_bytes, EMPTY, dtype=np.int64)
    kinds = layout.groups
    held = list(zip(share.layers, kinds.places(share.layers), strict=True))
    shards_of_finest = share.first_head, share.first_head + share.num_heads
    page_bytes = layout.block_bytes // layout.pages_per_block
    for block, group in enumerate(groups):
        heads = kinds.heads[group]
        finer = kinds.finest.num_kv_heads // heads.num_kv_heads
        mine = sorted({head // finer for head in range(*shards_of_finest)})
        row = heads.head_dim * ELEMENT
        room = page_bytes // (len(mine) * 2 * layout.kernel_block_size * row)  # layers
        for page in range(layout.pages_per_block):
            tokens = slice(page * layout.kernel_block_size, (page + 1) * layout.kernel_block_size)
            start = (block * layout.pages_per_block + page) * page_bytes
            for number, head in enumerate(mine):
                for layer, (its, index) in held:
                    if its == group:
                        values = cells[layer][block, head, :, tokens].ravel()
                        at = start + (number * room + index) * 2 * layout.kernel_block_size * row
                        assert index < room
                        assert at + len(values) <= start + page_bytes
                        memory[at : at + len(values)] = values
    return memory


@examples(200)
@given(cases(), st.data(), st.integers(1, 4000))
def test_each_wanted_byte_lands_once_from_a_node_of_any_shape(case: Case, draw: st.DataObject, limit: int) -> None:
    groups = case.groups
    rank = draw.draw(st.integers(0, len(case.ours.layouts) - 1))
    layout = case.ours.layouts[rank]
    share = case.ours.shares[rank]
    local = draw.draw(st.permutations(range(5)))[: draw.draw(st.integers(0, 5))]
    remote = draw.draw(st.permutations(range(5)))[: len(local)]
    of_block = [draw.draw(st.integers(0, groups.num_groups - 1)) for _ in local]
    read = KVRead(1, "e1", tuple(local), tuple(remote), tuple(of_block))
    cells = cells_of(groups, case.block_size, 5)
    remote_groups = dict(zip(remote, of_block, strict=True))
    memory = np.full(layout.total_bytes, EMPTY, dtype=np.int64)
    peer = Peer("node", "e1", case.theirs.ranks)
    for source in LocalRank(tuple(case.ours.shares), rank).source_ranks(layout, peer):
        origin = memory_of(
            cells, source.rank.layout, source.rank.part, [remote_groups.get(block, 0) for block in range(5)]
        )
        for chunk in plan_read(read, source.slices, limit):
            ranges = source.slices[chunk.number].byte_ranges(chunk.local, chunk.remote)
            for at, start, count in zip(*(column.tolist() for column in ranges), strict=True):
                values = origin[start : start + count]
                held = values != EMPTY
                assert (memory[at : at + count][held] == EMPTY).all(), "a byte is written twice"
                memory[at : at + count] = values
    moved = {layer: np.full_like(values, EMPTY) for layer, values in cells.items()}
    for mine, its in zip(local, remote, strict=True):
        for layer, values in cells.items():
            moved[layer][mine] = values[its]
    group_of = dict(zip(local, of_block, strict=True))
    assert (memory == memory_of(moved, layout, share, [group_of.get(block, 0) for block in range(5)])).all()


def digests_of(node: Node, cells: Cells, order: DigestOrder) -> list[int]:
    """Return the sum of the digests of a node's ranks; one of the ranks with equal parts counts."""
    total = np.zeros(len(order.block_ids), np.int64)
    for share, layout in dict(zip(node.shares, node.layouts, strict=True)).items():
        memory = torch.from_numpy((memory_of(cells, layout, share, list(order.groups)) % 256).astype(np.uint8))
        digester = KVDigester(memory.view(torch.float16).view(layout.shape), layout, share)
        total += digester.compute([order]).numpy()
    return total.tolist()


@examples(60)
@given(cases(), st.integers(0, 1000))
def test_digests_of_the_ranks_of_any_two_nodes_add_up_to_the_same(case: Case, seed: int) -> None:
    """A changed byte of the first token in a block changes that block's digest alone."""
    groups = case.groups
    rng = np.random.default_rng(seed)
    shapes = cells_of(groups, case.block_size, 5)
    cells = {layer: rng.integers(0, 255, values.shape) for layer, values in shapes.items()}
    of_block = rng.integers(0, groups.num_groups, 5).tolist()
    num_tokens = int(rng.integers(1, 5 * case.block_size))
    order = DigestOrder(tuple(range(5)), num_tokens, tuple(of_block))
    digests = digests_of(case.ours, cells, order)
    assert digests == digests_of(case.theirs, cells, order)
    block = int(rng.integers(5))
    layer = groups.layers.index(of_block[block])
    cells[layer][block, -1, 1, 0, -1] ^= 1
    differs = [a != b for a, b in zip(digests, digests_of(case.ours, cells, order), strict=True)]
    assert differs == [number == block for number in range(5)]


@examples(60)
@given(cases(), st.data())
def test_views_of_the_cache_are_the_memory_that_reads_fill(case: Case, draw: st.DataObject) -> None:
    rank = draw.draw(st.integers(0, len(case.ours.layouts) - 1))
    layout = case.ours.layouts[rank]
    share = case.ours.shares[rank]
    of_block = [draw.draw(st.integers(0, case.groups.num_groups - 1)) for _ in range(5)]
    cells = {layer: values % 251 for layer, values in cells_of(case.groups, case.block_size, 5).items()}
    memory = memory_of(cells, layout, share, of_block)
    cache = KVCache(layout, torch.device("cpu"), share)
    cache.tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(memory.clip(0).astype(np.uint8)))
    views: dict[int, torch.Tensor] = {}
    for layers, part in cache.head_parts():
        page = part.layout.kernel_block_size
        for number, layer in enumerate(layers):
            views[layer] = part.layers[number].view(torch.uint8)
            pages, heads, planes, *_ = part.layers[number].shape
            rows = [
                part.rows_per_page * at + head * part.layout.num_layers * planes + plane
                for at in range(pages)
                for head in range(heads)
                for plane in range(planes)
            ]
            gathered = part.page_rows[number][rows].view(pages, heads, planes, page, -1)
            assert torch.equal(gathered.view(torch.int16), part.layers[number].view(torch.int16))
    for place, layer in enumerate(share.layers):
        group = case.groups.layers[layer]
        held_heads = share.heads_in(case.groups, group)
        for block in (block for block, its in enumerate(of_block) if its == group):
            for page in range(layout.pages_per_block):
                tokens = slice(page * layout.kernel_block_size, (page + 1) * layout.kernel_block_size)
                expected = cells[layer][block, held_heads.start : held_heads.stop, :, tokens]
                held = views[place][block * layout.pages_per_block + page]
                assert held.tolist() == expected.tolist()


@given(cases())
def test_the_handshake_carries_groups_of_unlike_heads(case: Case) -> None:
    for rank in case.theirs.ranks:
        message = rank_to_pb(rank)
        check_message(message)
        assert rank_from_pb(type(message).FromString(message.SerializeToString())) == rank


PUBLISHED = {  # layers by kind, their number, and the size of a block as in shared facts: groups, layers of a group
    "E2B": (["s", "s", "s", "s", "f"] * 3, KVHeads(1, 512), KVHeads(1, 256), [3, 6, 6]),
    "E4B": ((["s"] * 5 + ["f"]) * 4, KVHeads(2, 512), KVHeads(2, 256), [4, 7, 7, 6]),
    "26B-A4B": ((["s"] * 5 + ["f"]) * 5, KVHeads(2, 512), KVHeads(8, 256), [5, *[3] * 7, 2, 2]),
    "31B": ((["s"] * 5 + ["f"]) * 10, KVHeads(4, 512), KVHeads(16, 256), [10, *[5] * 10]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_get_few_groups_with_little_padding(name: str) -> None:
    kinds, full, sliding, sizes = PUBLISHED[name]
    groups = cut_into_groups(
        [1024 if kind == "s" else None for kind in kinds], [sliding if kind == "s" else full for kind in kinds]
    )
    assert [groups.layers.count(group) for group in range(groups.num_groups)] == sizes
    assert groups.windows == (None, *[1024] * (len(sizes) - 1))
    layout = KVLayout(
        1, 16, 16, groups.block_layers(range(len(kinds)), groups.finest.num_kv_heads),
        FullAttentionSpec(groups.finest.num_kv_heads, groups.finest.head_dim, "bfloat16"), groups,
    )  # fmt: skip
    held = sum(groups.heads[group].size for group in groups.layers) * 2 * 2 * 16
    assert held <= layout.block_bytes * groups.num_groups <= 1.25 * held


def test_equal_heads_of_all_layers_are_no_heads_per_layer() -> None:
    assert cut_into_groups([None, 8, None], [KVHeads(2, 4)] * 3) == cut_into_groups([None, 8, None])


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((KVHeads(4, 2),), "1 KV heads of 2 KV cache groups"),
        ((KVHeads(4, 2), KVHeads(3, 2)), "each number of heads divide 4"),
        ((KVHeads(4, 2), KVHeads(0, 2)), "at least 1"),
    ],
)
def test_impossible_heads_of_groups_are_refused(heads: tuple[KVHeads, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheGroups((None, 8), (0, 1), heads)


GROUPS = KVCacheGroups((None, 8), (0, 1), (KVHeads(2, 4), KVHeads(4, 2)))


def refusal(theirs: Node) -> str:
    ours = node(GROUPS, 4, [2], 1, 4, 5)
    with pytest.raises(PeerError) as error:
        LocalRank(tuple(ours.shares), 0).source_ranks(ours.layouts[0], Peer("node", "e1", theirs.ranks))
    return str(error.value)


def test_other_heads_of_a_group_are_refused_with_both() -> None:
    other = KVCacheGroups((None, 8), (0, 1), (KVHeads(1, 4), KVHeads(4, 2)))
    message = refusal(node(other, 4, [2], 1, 4, 5))
    assert "2 KV heads × 4" in message
    assert "1 KV heads × 4" in message
    equal = KVCacheGroups((None, 8), (0, 1))
    layout = KVLayout(5, 4, 4, 1, FullAttentionSpec(4, 2, "float16"), equal)
    assert "kv_groups" in refusal(Node([layout], [KVShare.whole(layout)]))


def test_shards_that_cut_a_head_of_a_group_are_refused() -> None:
    """Shards of 1 and 3 of the finest heads: the second one begins amid a head of the other group."""
    shares = [KVShare(0, 2, 0, 1, 2, 4), KVShare(0, 2, 1, 3, 2, 4)]
    layouts = [
        KVLayout(
            5, 4, 4, GROUPS.block_layers(range(2), share.num_heads), FullAttentionSpec(share.num_heads, 2, "float16"),
            GROUPS,
        )
        for share in shares
    ]  # fmt: skip
    assert "split or repeat the heads of each group" in refusal(Node(layouts, shares))


def test_a_share_of_other_heads_than_the_finest_group_is_refused() -> None:
    ours = node(GROUPS, 4, [2], 1, 4, 5)
    layout = msgspec.structs.replace(ours.layouts[0], spec=FullAttentionSpec(2, 2, "float16"))
    assert "num_kv_heads: 4 here, 2 at the peer" in refusal(Node([layout], [KVShare.whole(layout)]))
