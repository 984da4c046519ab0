"""Bytes really moved between nodes of unequal shape: over NIXL, an agent per rank, and through the connectors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import msgspec
import numpy as np
import pytest
from kv_nodes import UNTOUCHED, Reader, Source, pattern
from kv_ranks import Model, Node, node, packed
from numpy.typing import NDArray

from connector import build
from connector.bridge import sources
from connector.nixl import Agent
from connector.plan import plan_read
from pdserve.kv import KVLayout, KVShare
from pdserve.records import KVRead, Peer

NUM_LAYERS, NUM_BLOCKS = 4, 6
MODEL = Model(num_heads=4, block_size=64, head_dim=16, dtype="bfloat16")
ROW_BYTES = 32
LOCAL, REMOTE = [7, 0, 1, 4], [1, 4, 5, 0]


def shape(num_shards: int = 1, stage_layers: tuple[int, ...] = (NUM_LAYERS,), page: int = 64) -> Node:
    return node(MODEL, stage_layers, num_shards, page, [NUM_BLOCKS, NUM_BLOCKS + 3])


def ours(num_shards: int = 1, stage_layers: tuple[int, ...] = (NUM_LAYERS,), page: int = 64) -> Node:
    return node(MODEL, stage_layers, num_shards, page, [8, 11])


def random_cells(num_blocks: int) -> NDArray[np.uint8]:
    """All KV of a node, as bytes; no byte is UNTOUCHED."""
    size = (num_blocks, MODEL.num_heads, NUM_LAYERS, 2, MODEL.block_size, ROW_BYTES)
    return np.random.default_rng(0).integers(0, UNTOUCHED, size, dtype=np.uint8)


def expected(cells: NDArray[np.uint8], layout: KVLayout, share: KVShare) -> NDArray[np.uint8]:
    """A rank's memory after REMOTE was read into LOCAL."""
    wanted = np.full((layout.num_blocks, *cells.shape[1:]), UNTOUCHED, dtype=np.uint8)
    wanted[LOCAL] = cells[REMOTE]
    return packed(wanted, layout, share)


class NixlRank:
    """A rank of a node in this process, with an agent of its own."""

    def __init__(self, of: Node, number: int, memory: NDArray[np.uint8], stack: ExitStack) -> None:
        name = f"rank-{number}-{os.urandom(4).hex()}"
        self.memory = memory
        self.agent = stack.enter_context(closing(Agent(name)))
        bare = of.rank(number, memory.ctypes.data, name)
        self.agent.register(bare.region)
        self.rank = msgspec.structs.replace(bare, metadata=self.agent.metadata())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def read_all(reader: NixlRank, mine: Node, number: int, peer: Peer) -> None:
    agent, order = reader.agent, KVRead(1, peer.epoch, tuple(LOCAL), tuple(REMOTE))
    for source in sources(reader.rank.layout, mine.shares, number, peer):
        agent.add(source.rank.metadata)
        local = agent.prepare(None, reader.rank.region, source.cut.local)
        remote = agent.prepare(source.rank.agent, source.rank.region, source.cut.remote)
        for piece in plan_read(order, source.cut, max_bytes=100_000):
            numbers = source.cut.local.descriptors(piece.local), source.cut.remote.descriptors(piece.remote)
            transfer = agent.read(local, numbers[0], remote, numbers[1])
            deadline = time.monotonic() + 10
            done = transfer.post()
            while not done:
                assert time.monotonic() < deadline, "the read did not end within 10 s"
                time.sleep(0.001)
                done = transfer.done()
            transfer.release()
        agent.release(local)
        agent.release(remote)
        agent.remove(source.rank.agent)


SHAPES = [
    pytest.param(shape(1), ours(2), id="tp 1 to 2"),
    pytest.param(shape(2), ours(1), id="tp 2 to 1"),
    pytest.param(shape(2), ours(4), id="tp 2 to 4"),
    pytest.param(shape(4), ours(1), id="tp 4 to 1"),
    pytest.param(shape(8), ours(2), id="tp 8 (replicated) to 2"),
    pytest.param(shape(1), ours(1, (2, 2)), id="pp 1 to 2"),
    pytest.param(shape(1, (1, 3)), ours(1), id="pp 2 (uneven) to 1"),
    pytest.param(shape(2, (2, 2)), ours(1), id="tp 2, pp 2 to one rank"),
    pytest.param(shape(1), ours(2, (3, 1)), id="one rank to tp 2, pp 2"),
    pytest.param(shape(page=64), ours(page=16), id="pages of 64 to 16"),
    pytest.param(shape(page=16), ours(page=64), id="pages of 16 to 64"),
    pytest.param(shape(2, (2, 2), 16), ours(4, (1, 3), 32), id="all of it"),
]


@pytest.mark.parametrize(("theirs", "mine"), SHAPES)
def test_every_rank_gets_its_part_over_nixl(theirs: Node, mine: Node, stack: ExitStack) -> None:
    cells = random_cells(NUM_BLOCKS + 3)
    memories = [packed(cells, *part) for part in zip(theirs.layouts, theirs.shares, strict=True)]
    held = [NixlRank(theirs, number, memory, stack) for number, memory in enumerate(memories)]
    peer = Peer("peer", "e1", tuple(rank.rank for rank in held))
    for number, (layout, share) in enumerate(zip(mine.layouts, mine.shares, strict=True)):
        reader = NixlRank(mine, number, np.full(layout.total_bytes, UNTOUCHED, np.uint8), stack)
        read_all(reader, mine, number, peer)
        assert (reader.memory == expected(cells, layout, share)).all()


@pytest.mark.parametrize("theirs", [shape(2), shape(8), shape(2, (1, 3), 16), shape(page=16)])
def test_a_node_of_one_rank_reads_from_any_within_a_process(theirs: Node, stack: ExitStack) -> None:
    cells = random_cells(NUM_BLOCKS + 3)
    memories = [packed(cells, *part) for part in zip(theirs.layouts, theirs.shares, strict=True)]
    ranks = []
    for number, memory in enumerate(memories):
        owner = stack.enter_context(closing(build("local", f"rank-{number}")))
        rank = theirs.rank(number, memory.ctypes.data)
        registered = owner.register(rank.region, rank.layout, lambda: None)
        ranks.append(msgspec.structs.replace(registered, share=rank.share))
    (layout,), (share,) = ours().layouts, ours().shares
    reader = Reader(stack.enter_context(closing(build("local", "reader"))), layout)
    assert reader.connect(Peer("peer", "e1", tuple(ranks))) == ""
    result = reader.read("e1", LOCAL, REMOTE)
    assert (result.error, result.num_bytes) == ("", len(LOCAL) * layout.block_bytes)
    assert (reader.blocks.ravel() == expected(cells, layout, share)).all()


@pytest.mark.parametrize(("page", "their_page"), [(16, 64), (64, 16)])
def test_pages_of_another_size_arrive_through_the_nixl_connector(page: int, their_page: int, stack: ExitStack) -> None:
    layout, theirs = ours(page=page).layouts[0], shape(page=their_page).layouts[0]
    source = Source(f"source-{os.urandom(4).hex()}", theirs)
    stack.callback(source.kill)
    reader = Reader(stack.enter_context(closing(build("nixl", f"reader-{os.urandom(4).hex()}"))), layout)
    assert reader.connect(source.peer) == ""
    result = reader.read(source.epoch, LOCAL, REMOTE)
    assert (result.error, result.num_bytes) == ("", len(LOCAL) * layout.block_bytes)

    def rows(blocks: NDArray[np.uint8], of: KVLayout) -> NDArray[np.uint8]:
        """[blocks, heads, layers, 2, tokens, row]"""
        pages = blocks.reshape(-1, of.pages_per_block, *of.shape[1:5], ROW_BYTES)
        return np.concatenate([pages[:, number] for number in range(of.pages_per_block)], axis=-2)

    assert (rows(reader.blocks[LOCAL], layout) == rows(pattern(theirs)[REMOTE], theirs)).all()
    assert not set(LOCAL) ^ reader.touched()
