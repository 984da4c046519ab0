"""Reads between nodes of unequal shape, through the connectors of their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache

import pytest
import torch
from fast_set import sampled
from kv_rank_groups import RankGroup
from kv_ranks import Model, Node, node, random_cells

from pdserve.records import DigestOrder
from runner.kv_digest import KVDigester

MODEL = Model(num_heads=2, block_size=64, head_dim=16, dtype="bfloat16")
WITHIN_PROCESS = "local_connector:LocalConnector"
LOCAL = [7, 0, 1, 4]
REMOTE = [1, 4, 5, 0]

SHAPES = {  # pipeline stages by layers, tensor shards, kernel page
    "one rank": ((4,), 1, 64),
    "pp2": ((1, 3), 1, 64),
    "tp2": ((4,), 2, 64),
    "pp2 tp2": ((2, 2), 2, 64),
    "tp4": ((4,), 4, 64),  # two shards to a head
    "small pages": ((4,), 1, 16),
    "pp2 tp2, small pages": ((3, 1), 2, 16),
}
ONE_PAGE_SIZE = list(SHAPES)[:5]
PAIRS = [
    *sampled(ONE_PAGE_SIZE, ONE_PAGE_SIZE, every=2),
    ("one rank", "small pages"),
    ("small pages", "one rank"),
    ("pp2", "pp2 tp2, small pages"),
    ("pp2 tp2, small pages", "tp4"),
]


def shape(name: str, *num_blocks: int) -> Node:
    stage_layers, num_shards, page = SHAPES[name]
    return node(MODEL, stage_layers, num_shards, page, num_blocks)


CELLS = random_cells(shape("one rank", 1).layouts[0], shape("one rank", 1).shares[0], 9)


class Fleet:
    """A source and a reader of each shape, started on first use."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        def start(role: str, name: str, *num_blocks: int) -> RankGroup:
            group = RankGroup(kind, f"{role}-{list(SHAPES).index(name)}", shape(name, *num_blocks))
            return stack.enter_context(closing(group))

        @cache
        def source(name: str) -> RankGroup:
            group = start("source", name, 6, 9)  # some ranks have more blocks than others
            group.fill(CELLS)
            return group

        self.source = source
        self.reader = cache(lambda name: start("reader", name, 8, 11))


@pytest.fixture(scope="module", params=["nixl", pytest.param("nixl over tcp", marks=pytest.mark.slow), WITHIN_PROCESS])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with ExitStack() as stack:
        if request.param == "nixl over tcp":
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("UCX_TLS", "tcp")
        yield Fleet(request.param.partition(" ")[0], stack)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda name: name)
def test_each_rank_reads_its_part(fleet: Fleet, theirs: str, ours: str) -> None:
    source = fleet.source(theirs)
    reader = fleet.reader(ours)
    reader.reset()
    assert not any(reader.connect(source.peer))
    results = reader.read(source.epoch, LOCAL, REMOTE)
    assert [result.error for result in results] == [""] * len(results)
    assert [result.num_bytes for result in results] == [
        len(LOCAL) * layout.block_bytes for layout in reader.node.layouts
    ]
    reader.check(CELLS, LOCAL, REMOTE)


def digests(group: RankGroup, block_ids: list[int]) -> list[int]:
    """Return digests of whole blocks: the sums over the parts, each counted once."""
    order = DigestOrder(tuple(block_ids), len(block_ids) * MODEL.block_size)
    parts = {}
    for rank, layout, share in zip(group.ranks, group.node.layouts, group.node.shares, strict=True):
        memory = torch.from_numpy(rank.blocks).view(getattr(torch, layout.dtype)).view(layout.shape)
        parts[share] = KVDigester(memory, layout, share).compute([order])
    return list(sum(parts.values(), torch.zeros(len(block_ids), dtype=torch.int64)).tolist())


def test_digests_of_read_blocks_equal_those_of_the_source() -> None:
    with closing(RankGroup(WITHIN_PROCESS, "source", shape("pp2 tp2, small pages", 9))) as source:
        source.fill(CELLS)
        with closing(RankGroup(WITHIN_PROCESS, "reader", shape("tp4", 9))) as reader:
            assert not any(reader.connect(source.peer))
            assert not any(result.error for result in reader.read(source.epoch, LOCAL, REMOTE))
            assert digests(reader, LOCAL) == digests(source, REMOTE)
