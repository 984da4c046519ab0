"""State mapping: which ranks of a peer hold the recurrent layers of one local rank.

Both nodes have the same tensor shards. Their pipeline stages may differ: a slot has the state of layer after layer, so
what two ranks have in common is one byte range of a slot.
"""

from __future__ import annotations

import numpy as np

from connector.planning.block_slicing import BlockRanges, BlockSlices
from connector.planning.regions import check_region
from pdserve.errors import PeerError
from pdserve.kv.states import RankStates
from pdserve.records import Peer

MAX_SLOTS = 2**31 - 1  # slot numbers are int32


def slice_states(ours: RankStates | None, peer: Peer) -> dict[str, tuple[BlockSlices]]:
    """Return the part of a slot that each needed rank of ``peer`` has for this rank, by agent.

    Raises PeerError, naming both values, if the nodes do not fit.
    """
    slices = {}
    held = np.zeros(0 if ours is None else ours.share.num_layers, np.int64)
    for rank in peer.ranks:
        theirs = rank.states
        if ours is None or theirs is None:
            if ours is not theirs:
                here, there = ("no" if states is None else "a" for states in (ours, theirs))
                raise PeerError(f"{here} recurrent state here, {there} recurrent state at the peer; start both alike")
            continue
        _check_compatible(ours, theirs)
        mine = ours.share
        its = theirs.share
        start = max(mine.first_layer, its.first_layer)
        end = min(mine.first_layer + mine.num_layers, its.first_layer + its.num_layers)
        if its.shard == mine.shard and start < end:
            slices[rank.agent] = (BlockSlices(_ranges(ours, start, end), _ranges(theirs, start, end)),)
            held[start - mine.first_layer : end - mine.first_layer] += 1
    if ours is not None and (held != 1).any():
        layer = int(np.argmax(held != 1))
        raise PeerError(
            f"recurrent layer {layer + ours.share.first_layer} is held by {held[layer]} ranks of peer {peer.node_id}, "
            "instead of 1; its ranks must split the model without gaps and overlaps"
        )
    return slices


def _check_compatible(ours: RankStates, theirs: RankStates) -> None:
    here = _fields(ours)
    there = _fields(theirs)
    for name in here:
        if here[name] != there[name]:
            raise PeerError(
                f"recurrent states differ in {name}: {here[name]} here, {there[name]} at the peer; "
                "start both nodes alike"
            )
    if theirs.layout.num_layers != theirs.share.num_layers or not 1 <= theirs.layout.num_slots <= MAX_SLOTS:
        layout = theirs.layout
        raise PeerError(f"the peer names {layout.num_slots} slots of {layout.num_layers} recurrent layers")
    check_region(theirs.region, theirs.layout.total_bytes, f"{theirs.layout.num_slots} slots")


def _fields(states: RankStates) -> dict[str, object]:
    share = states.share
    return {
        "total_layers": share.total_layers,
        "tensor shards": share.num_shards,
        **states.layout.spec.compat_fields,
    }


def _ranges(states: RankStates, start: int, end: int) -> BlockRanges:
    layer_bytes = states.layout.spec.layer_bytes
    layout = states.layout
    offset = (start - states.share.first_layer) * layer_bytes
    num_bytes = (end - start) * layer_bytes
    return BlockRanges(
        np.array([offset], np.int64), np.array([num_bytes], np.int64), layout.slot_bytes, layout.num_slots
    )
