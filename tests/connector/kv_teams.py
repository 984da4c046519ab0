"""Nodes of several ranks: one whose connectors are in this process, and one with a process per rank to read from."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from kv_nodes import Reader, Source
from kv_ranks import Node, packed
from numpy.typing import NDArray

from connector import build
from pdserve.records import Peer, ReadResult
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming


class Team:
    """A node that reads and can be read from: a connector of ``kind`` for each of its ranks."""

    def __init__(self, kind: str, name: str, of: Node, timing: PeerTiming = DEFAULT_TIMING) -> None:
        self.node = of
        self.epoch = os.urandom(4).hex()
        connectors = [
            build(kind, f"{name}-{self.epoch}-r{number}", timing, tuple(of.shares), number)
            for number in range(len(of.shares))
        ]
        self.ranks = [Reader(*pair) for pair in zip(connectors, of.layouts, strict=True)]
        self.peer = Peer(name, self.epoch, tuple(rank.rank for rank in self.ranks))

    def fill(self, cells: NDArray[np.uint8]) -> None:
        """Have the caches hold blocks of a model's KV, as many as there are."""
        for rank, layout, share in zip(self.ranks, self.node.layouts, self.node.shares, strict=True):
            rank.blocks.reshape(-1)[:] = packed(cells, layout, share)

    def reset(self) -> None:
        for rank in self.ranks:
            rank.reset()

    def connect(self, peer: Peer) -> list[str]:
        """Of each rank: empty, or why it failed."""
        return [rank.connect(peer) for rank in self.ranks]

    def read(self, epoch: str, local: list[int], remote: list[int]) -> list[ReadResult]:
        """By rank; all read at the same time."""
        orders = [rank.order(epoch, local, remote) for rank in self.ranks]
        return [rank.result(order) for rank, order in zip(self.ranks, orders, strict=True)]

    def check(self, cells: NDArray[np.uint8], local: list[int], remote: list[int]) -> None:
        """Every rank has its part of these blocks of the model's KV, and no other block was touched."""
        for rank, layout, share in zip(self.ranks, self.node.layouts, self.node.shares, strict=True):
            wanted = packed(cells[remote], msgspec.structs.replace(layout, num_blocks=len(local)), share)
            assert (rank.blocks[local].reshape(-1) == wanted).all()
            assert rank.touched() == set(local)

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.close()


class Processes:
    """A node to read from, with a process for each of its ranks. Its blocks are random cells of the model."""

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
