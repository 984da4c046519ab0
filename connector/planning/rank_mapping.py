"""Whom to read from: the ranks of a peer that hold what one of our ranks needs, and whether the two can be bridged.

                 heads 0 1 2 3                      0 1 2 3
    layers 0 1        [ a | b ]      our rank        . . . .      reads from a and b,
           2 3        [ c | d ]      2 stages,       . # # .      c and d
                     peer's ranks    layers 1 2      . # # .

Everything a peer says is checked here, when it is connected: reads can rely on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from connector.planning.block_slicing import Cut, cut_blocks
from pdserve.errors import ConfigError, PeerError
from pdserve.kv import KVLayout, KVShare
from pdserve.records import KVRegion, Peer, RankKV

DEVICES = ("cpu", "cuda")
MAX_DESCRIPTORS = 2**31 - 1  # blocks and descriptors are numbered in int32
ADDRESS_SPACE = 2**64  # bytes


class SourceRank(NamedTuple):
    """A rank to read from, and which of its bytes."""

    rank: RankKV
    cut: Cut


class OwnRanks(NamedTuple):
    """What the ranks of this node hold, and which of them this one is. No shares: it is the only one and holds all."""

    shares: tuple[KVShare, ...] = ()  # by rank
    rank: int = 0

    @property
    def share(self) -> KVShare | None:
        """What peers are told that this rank holds; None for all of the model."""
        return self.shares[self.rank] if len(self.shares) > 1 else None

    def sources(self, layout: KVLayout, peer: Peer) -> tuple[SourceRank, ...]:
        """Whom this rank, of that layout, reads from. Raises PeerError where the two nodes cannot be bridged."""
        return sources(layout, self.shares or (KVShare.whole(layout),), self.rank, peer)


ONLY_RANK = OwnRanks()


def sources(layout: KVLayout, shares: Sequence[KVShare], rank: int, peer: Peer) -> tuple[SourceRank, ...]:
    """The ranks of ``peer`` that together hold, each byte once, what rank number ``rank`` of this node holds.

    ``layout`` is that rank's; ``shares`` are those of all ranks of this node. Where several ranks of the peer hold the
    same, those of ours that read it take turns. Raises PeerError where the two nodes cannot be bridged.
    """
    ours = shares[rank]
    assert (layout.num_layers, layout.num_kv_heads) == (ours.num_layers, ours.num_heads)
    _check_names(peer)
    replicas: dict[KVShare, list[RankKV]] = {}
    for theirs in peer.ranks:
        with naming(peer, theirs):
            check_compatible(layout, ours, theirs)
        replicas.setdefault(_part(theirs), []).append(theirs)
    needed = [share for share in replicas if _overlap(ours, share)]
    _check_cover(ours, needed, peer)
    found = []
    for share in needed:
        turn = sum(_overlap(other, share) for other in shares[:rank])
        chosen = replicas[share][turn % len(replicas[share])]
        found.append(SourceRank(chosen, cut_blocks(layout, ours, chosen.layout, share)))
        with naming(peer, chosen):
            _check_descriptors(layout, chosen.layout, found[-1].cut.num_ranges)
    return tuple(found)


def check_compatible(layout: KVLayout, share: KVShare, theirs: RankKV) -> None:
    """Raise PeerError, naming both values, unless blocks of a peer's rank can be cut to fit ours."""
    part = _part(theirs)
    for field, here, there in (
        ("block_size", layout.block_size, theirs.layout.block_size),
        ("head_dim", layout.head_dim, theirs.layout.head_dim),
        ("dtype", layout.dtype, theirs.layout.dtype),
        ("num_layers", share.total_layers, part.total_layers),
        ("num_kv_heads", share.total_heads, part.total_heads),
    ):
        if here != there:
            raise PeerError(f"KV layouts differ in {field}: {here} here, {there} at the peer; start both nodes alike")
    cached, held = (theirs.layout.num_layers, theirs.layout.num_kv_heads), (part.num_layers, part.num_heads)
    if cached != held:
        raise PeerError(f"a rank of the peer has room for {cached} layers and KV heads, but says it holds {held}")
    if not 1 <= theirs.layout.num_blocks <= MAX_DESCRIPTORS:
        raise PeerError(f"the peer names {theirs.layout.num_blocks} blocks; a KV cache has 1 … {MAX_DESCRIPTORS}")
    check_region(theirs.region, theirs.layout)


def check_region(region: KVRegion, layout: KVLayout) -> None:
    """Raise PeerError unless every block of ``layout`` lies inside ``region`` and the region inside memory."""
    if region.device not in DEVICES:
        raise PeerError(f"KV memory on device {region.device!r}; known are {', '.join(DEVICES)}")
    if region.device_id < 0:
        raise PeerError(f"KV memory on device number {region.device_id}; it must be at least 0")
    if layout.total_bytes < 1 or layout.total_bytes > region.num_bytes:
        raise PeerError(f"{layout.num_blocks} blocks take {layout.total_bytes} B, the region has {region.num_bytes} B")
    if region.address < 1 or region.address + region.num_bytes > ADDRESS_SPACE:
        raise PeerError(f"a region of {region.num_bytes} B at {region.address:#x} is outside of memory")


def label(peer: Peer, rank: RankKV) -> str:
    """How an error that concerns one rank of a peer begins: with its name, where there are several."""
    return f"rank {rank.agent}: " if len(peer.ranks) > 1 else ""


@contextmanager
def naming(peer: Peer, rank: RankKV) -> Iterator[None]:
    """A PeerError raised within begins with the rank's label."""
    try:
        yield
    except PeerError as error:
        raise PeerError(label(peer, rank) + str(error)) from error


def _check_names(peer: Peer) -> None:
    for name, count in Counter(rank.agent for rank in peer.ranks).items():
        if count > 1:
            raise PeerError(f"{count} ranks of peer {peer.node_id} say they are {name}; each needs a name of its own")


def _part(theirs: RankKV) -> KVShare:
    try:
        return theirs.part
    except ConfigError as error:  # its layout has no layers or no heads
        raise PeerError(f"the peer's KV: {error}") from error


def _overlap(one: KVShare, other: KVShare) -> bool:
    return all(
        max(mine.start, its.start) < min(mine.stop, its.stop)
        for mine, its in zip(_area(one), _area(other), strict=True)
    )


def _check_cover(ours: KVShare, needed: Sequence[KVShare], peer: Peer) -> None:
    """Each layer of each head that is ours must be in one of the needed shares, and in one only."""
    held = np.zeros((ours.total_layers, ours.total_heads), np.int64)
    for share in needed:
        held[_area(share)] += 1
    for layer, head in np.argwhere(held[_area(ours)] != 1)[:1]:
        layer, head = layer + ours.first_layer, head + ours.first_head
        raise PeerError(
            f"layer {layer} of KV head {head} is held by {held[layer, head]} different shares of peer {peer.node_id} "
            f"with {len(peer.ranks)} ranks, instead of 1; its ranks must split the model without gaps and overlaps"
        )


def _area(share: KVShare) -> tuple[slice, slice]:
    return (
        slice(share.first_layer, share.first_layer + share.num_layers),
        slice(share.first_head, share.first_head + share.num_heads),
    )


def _check_descriptors(layout: KVLayout, theirs: KVLayout, num_ranges: int) -> None:
    num_blocks = max(layout.num_blocks, theirs.num_blocks)
    if num_blocks * num_ranges > MAX_DESCRIPTORS:
        raise PeerError(
            f"{num_blocks} blocks in {num_ranges} ranges each are more than {MAX_DESCRIPTORS} descriptors; start both "
            f"nodes with one kernel_block_size: {layout.kernel_block_size} here, {theirs.kernel_block_size} at the peer"
        )
