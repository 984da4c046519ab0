"""A peer that describes its KV wrongly is refused: neither the engine nor a connector raises anything else."""

from __future__ import annotations

from typing import Any

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from lies import Lie, lies

from connector.planning.rank_mapping import LocalRank
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_parts import CacheParts
from engine.peers.connected_peers import ConnectedPeers
from pdserve.errors import ConfigError, PeerError
from pdserve.ipc.messages import EventBatch
from pdserve.kv.groups import KVCacheGroups, KVHeads
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion, KVShare
from pdserve.kv.states import GatedDeltaSpec, RankStates, ShortConvSpec, StateLayout, StateShare
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import NO_ORDERS, Peer, RankKV
from pdserve.rpc.field_ranges import check_answer
from pdserve.rpc.protobuf import layout_from_pb, rank_from_pb, rank_to_pb

SPEC = FullAttentionSpec(2, 4, "float16")
PLAIN = KVLayout(num_blocks=8, block_size=16, kernel_block_size=8, num_layers=6, spec=SPEC)
WINDOWS = KVLayout(8, 16, 8, 3, SPEC, KVCacheGroups((None, 32), (0, 1, 0, 1, 0, 1)))
UNLIKE = KVLayout(8, 16, 8, 3, SPEC, KVCacheGroups((None, 32), (0, 1, 0, 1, 0, 1), (KVHeads(1, 8), KVHeads(2, 4))))
WITH_DRAFTS = KVLayout(8, 16, 8, 7, SPEC)
DRAFTING = KVShare(0, 7, 0, 2, total_layers=7, total_heads=2, draft_layers=1)
STATES = RankStates(
    KVRegion(1 << 20, 1 << 20, "cpu", 0),
    StateLayout(4, 3, GatedDeltaSpec(2, 2, 4, 4, conv_width=4, dtype="float16")),
    StateShare(0, 3, 3, 0, 1),
)
SHORT = RankStates(STATES.region, StateLayout(4, 3, ShortConvSpec(8, conv_width=3, dtype="float16")), STATES.share)


def rank(layout: KVLayout, share: KVShare | None = None, states: RankStates | None = None) -> RankKV:
    return RankKV("agent", b"metadata", KVRegion(1 << 20, layout.total_bytes, "cpu", 0), layout, share, states)


#: A node's own rank, and the rank of an honest peer with equal KV.
NODES = {
    "plain": (LocalRank(), rank(PLAIN)),
    "windows": (LocalRank(), rank(WINDOWS)),
    "unlike heads": (LocalRank(), rank(UNLIKE)),
    "drafts": (LocalRank((DRAFTING,)), rank(WITH_DRAFTS, DRAFTING)),
    "short convolutions": (LocalRank(states=SHORT), rank(PLAIN, None, SHORT)),
    "states": (LocalRank(states=STATES), rank(PLAIN, None, STATES)),
}
LIES = lies(pb.HandshakeReply.DESCRIPTOR)


def connect(name: str, told: list[Lie], other_drafts: bool) -> list[str]:
    """Connect to a peer that tells lies. Return why it was refused: by the frontend, the engine, and the connector."""
    local, honest = NODES[name]
    message = pb.HandshakeReply(ranks=[rank_to_pb(honest)])
    for lie in told:
        lie.add_to(message)
    try:
        check_answer(message)
        peer = Peer("p", "e1", tuple(rank_from_pb(rank) for rank in message.ranks), other_drafts)
    except (PeerError, ConfigError) as exc:
        return [str(exc)]
    events = EventBatch()
    num_layers = local.shares[0].total_layers if local.shares else 6
    peers = ConnectedPeers(CacheParts(BlockPool(8), events, 16), num_layers=num_layers)
    peers.connect(peer)
    refused = [reason for _, reason in events.failed_peers]
    for ordered in peers.add_orders(NO_ORDERS).connect:
        try:
            local.source_ranks(honest.layout, ordered)
        except PeerError as exc:
            refused.append(str(exc))
    return refused


@pytest.mark.parametrize("other_drafts", [False, True])
@pytest.mark.parametrize("name", NODES)
def test_an_honest_peer_is_connected_and_each_single_lie_is_refused_or_harmless(name: str, other_drafts: bool) -> None:
    if name == "drafts" or not other_drafts:
        assert connect(name, [], other_drafts) == []
    for lie in LIES:
        connect(name, [lie], other_drafts)


@st.composite
def shares(draw: st.DrawFn) -> list[Lie]:
    """A part of some model, of any size and with any number of layers that make drafts."""
    numbers = []
    for what in ("layer", "head"):
        total = draw(st.integers(1, 12) | st.just(4096))
        first = draw(st.integers(0, total - 1))
        count = draw(st.integers(1, total - first))
        numbers += [(f"total_{what}s", total), (f"first_{what}", first), (f"num_{what}s", count)]
    numbers.append(("draft_layers", draw(st.integers(0, numbers[0][1] - 1))))
    return [Lie(("ranks", "share", name), value) for name, value in numbers]


@examples(500)
@given(st.sampled_from([*NODES]), shares(), st.lists(st.sampled_from(LIES), max_size=1), st.booleans())
def test_a_part_of_another_model_is_refused_or_harmless(
    name: str, share: list[Lie], told: list[Lie], other_drafts: bool
) -> None:
    connect(name, [*share, *told], other_drafts)


def test_layers_beyond_those_of_the_groups_are_refused() -> None:
    """The connector looked for the groups of layers that make drafts, which this node has not."""
    fields = {"total_layers": 9, "num_layers": 9, "draft_layers": 3, "total_heads": 2, "num_heads": 2, "first_head": 0}
    told = [Lie(("ranks", "share", name), value) for name, value in fields.items()]
    assert connect("windows", told, False) == [
        "KV layouts differ in total_layers: 6 here, 9 at the peer; start both nodes alike"
    ]


@pytest.mark.parametrize("field", ["num_kv_heads", "num_layers"])
def test_a_layout_of_nothing_is_a_failed_peer_and_no_exception_of_the_engine(field: str) -> None:
    message = rank_to_pb(rank(PLAIN))
    setattr(message.layout, field, 0)
    events = EventBatch()
    peers = ConnectedPeers(CacheParts(BlockPool(8), events, 16))
    peers.connect(Peer("p", "e1", (rank_from_pb(message),)))
    assert [epoch for epoch, _ in events.failed_peers] == ["e1"]
    assert not peers.has_orders


def test_a_rank_that_only_drafts_is_of_no_use_to_a_node_with_other_drafts() -> None:
    """A pipeline stage whose other layers keep no KV."""
    stage = KVShare(6, 1, 0, 2, total_layers=7, total_heads=2, draft_layers=1)
    assert stage.usable(False) is stage
    assert stage.usable(True) is None
    before = KVShare(0, 6, 0, 2, total_layers=7, total_heads=2, draft_layers=1)
    peer = Peer("p", "e1", (renamed("a", PLAIN, before), renamed("b", KVLayout(8, 16, 8, 1, SPEC), stage)), True)
    (source,) = LocalRank().source_ranks(PLAIN, peer)
    assert source.rank.agent == "a"


def renamed(agent: str, layout: KVLayout, share: KVShare) -> RankKV:
    return RankKV(agent, b"", KVRegion(1 << 20, layout.total_bytes, "cpu", 0), layout, share)


def test_the_error_of_an_impossible_block_size_costs_nothing() -> None:
    """An earlier error named the size's divisors, which a loop over all numbers up to the size found."""
    layout: Any = pb.KVLayout(
        block_size=2**32 - 1, kernel_block_size=7, num_layers=1, spec="full_attention", dtype="float16"
    )
    with pytest.raises(ConfigError, match="block_size 4294967295 must be at least 1 and at most 65536"):
        layout_from_pb(layout)
