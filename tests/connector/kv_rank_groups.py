"""Nodes of several ranks: one with all connectors in this process, one with a process per source rank."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from kv_nodes import Reader, Source
from kv_ranks import Node, packed
from numpy.typing import NDArray

from connector import build
from connector.setup import ConnectorSetup
from pdserve.records import Peer, ReadResult
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming


class RankGroup:
    """A node with one connector of ``kind`` per rank, which reads and can be read from."""

    def __init__(self, kind: str, name: str, of: Node, timing: PeerTiming = DEFAULT_TIMING) -> None:
        self.node = of
        self.epoch = os.urandom(4).hex()
        connectors = [
            build(kind, ConnectorSetup(f"{name}-{self.epoch}-r{number}", timing, tuple(of.shares), number))
            for number in range(len(of.shares))
        ]
        self.ranks = [Reader(*pair) for pair in zip(connectors, of.layouts, strict=True)]
        self.peer = Peer(name, self.epoch, tuple(rank.rank for rank in self.ranks))

    def fill(self, cells: NDArray[np.uint8]) -> None:
        """Fill the caches with the first blocks of a model's KV."""
        for rank, layout, share in zip(self.ranks, self.node.layouts, self.node.shares, strict=True):
            rank.blocks.reshape(-1)[:] = packed(cells, layout, share)

    def reset(self) -> None:
        for rank in self.ranks:
            rank.reset()

    def connect(self, peer: Peer) -> list[str]:
        """Connect each rank; return the reasons of failures, or empty strings."""
        return [rank.connect(peer) for rank in self.ranks]

    def read(self, epoch: str, local: list[int], remote: list[int]) -> list[ReadResult]:
        """Read on all ranks at the same time; return the results by rank."""
        orders = [rank.order(epoch, local, remote) for rank in self.ranks]
        return [rank.result(order) for rank, order in zip(self.ranks, orders, strict=True)]

    def check(self, cells: NDArray[np.uint8], local: list[int], remote: list[int]) -> None:
        """Assert that each rank has its part of these blocks of the model's KV, and that no other block was touched."""
        for rank, layout, share in zip(self.ranks, self.node.layouts, self.node.shares, strict=True):
            wanted = packed(cells[remote], msgspec.structs.replace(layout, num_blocks=len(local)), share)
            assert (rank.blocks[local].reshape(-1) == wanted).all()
            assert rank.touched() == set(local)

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.close()


class RankProcesses:
    """A source node with one process per rank. Its blocks are random cells of the model."""

    def __init__(self, name: str, of: Node) -> None:
        self.epoch = os.urandom(4).hex()

        def start(number: int) -> Source:
            return Source(f"{name}-{self.epoch}-r{number}", of.layouts[number], of.shares, number)

        with ThreadPoolExecutor() as pool:
            self.sources = list(pool.map(start, range(len(of.shares))))
        self.peer = Peer(name, self.epoch, tuple(source.peer.ranks[0] for source in self.sources))

    def kill(self) -> None:
        for source in self.sources:
            source.kill()
