"""Rank mapping: which ranks of a peer hold what one local rank needs, and whether the two layouts fit.

                 heads 0 1 2 3                      0 1 2 3
    layers 0 1        [ a | b ]    local rank        . . . .      reads from a, b, c and d
           2 3        [ c | d ]    layers 1 and 2    . # # .
                    peer's ranks   heads 1 and 2     . # # .

All data from a peer is checked here, when it is connected. Reads rely on these checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from connector.planning.block_slicing import BlockSlices, slice_blocks
from connector.planning.regions import check_region
from connector.planning.state_mapping import slice_states
from pdserve.errors import ConfigError, PeerError
from pdserve.kv.layout import KVLayout, KVRegion, KVShare
from pdserve.kv.states import NO_SLOT, RankStates
from pdserve.records import KVRead, Peer, RankKV

MAX_DESCRIPTORS = 2**31 - 1  # block and descriptor numbers are int32


class SourceRank(NamedTuple):
    """A rank to read from, and the slices of each block and of each slot of recurrent state that come from it."""

    rank: RankKV
    slices: tuple[BlockSlices, ...]  # one for all blocks, or one per KV cache group; none: no block
    state_slices: tuple[BlockSlices, ...] = ()  # none: no state

    @property
    def num_ranges(self) -> int:
        """The ranges of a block in the group where it has most."""
        return max((slices.num_ranges for slices in self.slices), default=0)

    def parts(self, ours: RankKV) -> list[SourcePart]:
        """Return what comes from this rank: parts of blocks, of states, or both. ``ours`` is the local rank."""
        parts = []
        if self.slices:
            parts.append(SourcePart(self.slices, ours.region, self.rank.region, of_states=False))
        if self.state_slices:
            assert ours.states is not None
            assert self.rank.states is not None
            parts.append(SourcePart(self.state_slices, ours.states.region, self.rank.states.region, of_states=True))
        return parts


class SourcePart(NamedTuple):
    """The slices of blocks, or of slots of recurrent state, that come from one rank, and the memory of both sides."""

    slices: tuple[BlockSlices, ...]
    local: KVRegion
    remote: KVRegion
    of_states: bool

    def read_of(self, read: KVRead) -> KVRead:
        """Return the blocks of a read, or the slot of its state as if it was a block."""
        if not self.of_states:
            return read
        local, remote = (() if slot == NO_SLOT else (slot,) for slot in (read.local_state, read.remote_state))
        return KVRead(read.read_id, read.epoch, local, remote)


class LocalRank(NamedTuple):
    """One rank of this node, and the parts of the model that all ranks hold. Without shares it is the only rank."""

    shares: tuple[KVShare, ...] = ()  # by rank
    rank: int = 0
    states: RankStates | None = None  # this rank's; None: no recurrent layers

    @property
    def share(self) -> KVShare | None:
        """The part that this rank announces to peers; None for the whole model, without layers that make drafts."""
        return (
            self.shares[self.rank] if len(self.shares) > 1 or any(share.draft_layers for share in self.shares) else None
        )

    def source_ranks(self, layout: KVLayout, peer: Peer) -> tuple[SourceRank, ...]:
        """Return the ranks of ``peer`` that together hold, each byte once, the part of this rank.

        ``layout`` is this rank's. If several ranks of the peer hold the same part, the readers of that part spread over
        them. Raises PeerError if the nodes do not fit.
        """
        shares = self.shares or (KVShare.whole(layout),)
        ours = shares[self.rank]
        assert (layout.num_layers, layout.num_kv_heads) == _room_for(layout, ours)
        _check_names(peer)
        replicas: dict[KVShare, list[RankKV]] = {}
        for theirs in peer.ranks:
            with naming_rank(peer, theirs):
                check_compatible(layout, ours, theirs)
            if (usable := _part(theirs).usable(peer.other_drafts)) is not None:
                replicas.setdefault(usable, []).append(theirs)
        needed = [share for share in replicas if _overlap(ours, share)]
        _check_cover(ours, needed, peer)
        states = slice_states(self.states, peer)
        sources = []
        for share in needed:
            num_earlier_readers = sum(_overlap(other, share) for other in shares[: self.rank])
            source = replicas[share][num_earlier_readers % len(replicas[share])]
            slices = slice_blocks(layout, ours, source.layout, share)
            sources.append(SourceRank(source, slices, states.pop(source.agent, ())))
            with naming_rank(peer, source):
                _check_descriptors(layout, source.layout, sources[-1].num_ranges)
        sources += [SourceRank(rank, (), states[rank.agent]) for rank in peer.ranks if rank.agent in states]
        return tuple(sources)


def check_compatible(layout: KVLayout, share: KVShare, theirs: RankKV) -> None:
    """Raise PeerError, naming both values, unless blocks of a peer's rank can be sliced for the local rank."""
    part = _part(theirs)
    here_spec = layout.spec.with_heads(share.total_heads).compat_fields
    there_spec = theirs.layout.spec.with_heads(part.total_heads).compat_fields
    fields: list[tuple[str, object, object]] = [
        *((name, here_spec.get(name), there_spec.get(name)) for name in here_spec | there_spec),
        ("block_size", layout.block_size, theirs.layout.block_size),
        ("num_layers", share.model_layers, part.model_layers),
        ("kv_groups", layout.groups, theirs.layout.groups),
    ]
    if layout.groups.layers:  # the groups name every layer, including layers that make drafts
        fields.append(("total_layers", share.total_layers, part.total_layers))
    if layout.spec.packed:  # its blocks cannot be split
        fields.insert(0, ("kernel_block_size", layout.kernel_block_size, theirs.layout.kernel_block_size))
        fields.append(("part of the model", _describe(share), _describe(part)))
    for field, here, there in fields:
        if here != there:
            raise PeerError(f"KV layouts differ in {field}: {here} here, {there} at the peer; start both nodes alike")
    _check_heads(theirs.layout, part)
    cached = (theirs.layout.num_layers, theirs.layout.num_kv_heads)
    held = _room_for(layout, part)
    if cached != held:
        raise PeerError(f"a rank of the peer has room for {cached} layers and KV heads, but says it holds {held}")
    if not 1 <= theirs.layout.num_blocks <= MAX_DESCRIPTORS:
        raise PeerError(f"the peer names {theirs.layout.num_blocks} blocks; a KV cache has 1 … {MAX_DESCRIPTORS}")
    check_region(theirs.region, theirs.layout.total_bytes, f"{theirs.layout.num_blocks} blocks")


def error_prefix(peer: Peer, rank: RankKV) -> str:
    """Return the start of error messages about one rank of a peer: its name if there are several ranks."""
    return f"rank {rank.agent}: " if len(peer.ranks) > 1 else ""


@contextmanager
def naming_rank(peer: Peer, rank: RankKV) -> Iterator[None]:
    """Add the rank's ``error_prefix`` to each PeerError raised inside."""
    try:
        yield
    except PeerError as error:
        raise PeerError(error_prefix(peer, rank) + str(error)) from error


def _check_names(peer: Peer) -> None:
    for name, count in Counter(rank.agent for rank in peer.ranks).items():
        if count > 1:
            raise PeerError(f"{count} ranks of peer {peer.node_id} say they are {name}; each needs a name of its own")


def _part(theirs: RankKV) -> KVShare:
    try:
        return theirs.part
    except ConfigError as error:  # its layout has no layers or no heads
        raise PeerError(f"the peer's KV: {error}") from error


def _check_heads(layout: KVLayout, share: KVShare) -> None:
    """Raise PeerError unless the rank's part has whole heads of all KV cache groups."""
    for group in range(layout.groups.num_groups) if layout.groups.heads else ():
        held = len(share.heads_in(layout.groups, group))
        cached = layout.groups.heads_of(group, layout.num_kv_heads).num_kv_heads
        if held != cached:
            raise PeerError(
                f"{share.num_heads} of {share.total_heads} KV heads from {share.first_head} on, as a rank of the peer "
                f"has them, are {held} heads of KV cache group {group}, and its blocks have {cached}; its shards must "
                "split or repeat the heads of each group"
            )


def _room_for(layout: KVLayout, share: KVShare) -> tuple[int, int]:
    """Return the layers and KV heads of a block on a rank with this part of the model."""
    return layout.groups.block_layers(share.layers, share.num_heads), share.num_heads


def _describe(share: KVShare) -> str:
    return f"{share.num_layers} layers from {share.first_layer}, {share.num_heads} heads from {share.first_head}"


def _layers(share: KVShare) -> slice:
    return slice(share.first_layer, share.first_layer + share.num_layers)


def _heads(share: KVShare) -> slice:
    return slice(share.first_head, share.first_head + share.num_heads)


def _overlap(one: KVShare, other: KVShare) -> bool:
    pairs = (_layers(one), _layers(other)), (_heads(one), _heads(other))
    return all(max(mine.start, its.start) < min(mine.stop, its.stop) for mine, its in pairs)


def _check_cover(ours: KVShare, needed: Sequence[KVShare], peer: Peer) -> None:
    """Raise PeerError unless exactly one of the needed shares holds each layer and head of ours.

    Layers that make drafts may be missing: their KV changes no token.
    """
    held = np.zeros((ours.total_layers, ours.total_heads), np.int64)
    for share in needed:
        held[_layers(share), _heads(share)] += 1
    held[ours.model_layers :] += held[ours.model_layers :] == 0
    for layer, head in np.argwhere(held[_layers(ours), _heads(ours)] != 1)[:1]:
        layer += ours.first_layer
        head += ours.first_head
        raise PeerError(
            f"layer {layer} of KV head {head} is held by {held[layer, head]} different shares of peer {peer.node_id} "
            f"with {len(peer.ranks)} ranks, instead of 1; its ranks must split the model without gaps and overlaps"
        )


def _check_descriptors(layout: KVLayout, theirs: KVLayout, num_ranges: int) -> None:
    num_blocks = max(layout.num_blocks, theirs.num_blocks)
    if num_blocks * num_ranges > MAX_DESCRIPTORS:
        raise PeerError(
            f"{num_blocks} blocks in {num_ranges} ranges each are more than {MAX_DESCRIPTORS} descriptors; start both "
            f"nodes with one kernel_block_size: {layout.kernel_block_size} here, {theirs.kernel_block_size} at the peer"
        )
