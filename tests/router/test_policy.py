"""Load-balancing policies as functions of a snapshot."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.errors import Overloaded
from pdserve.kv.groups import Windows
from pdserve.request_cost import LinearCost, RequestLoad, StepCosts, settled_shares, time_per_token
from router.fleet.moves import moves
from router.fleet.policy import (
    POLICIES,
    PREFIX_AWARE,
    FleetSnapshot,
    NodeView,
    Placement,
    Policy,
    PolicyRequest,
    compared_options,
    least_loaded,
    pooling_node,
    prefix_aware,
    price,
    prompt_shares,
    round_robin,
)

COSTS = StepCosts(prompt=LinearCost(5e-3, 25e-6), decode=LinearCost(5e-3, 20e-6), read=LinearCost(1e-3, 1e-6))
IDLE = RequestLoad(free_blocks=1000, total_blocks=1000, block_size=16)
ASK = PolicyRequest(4000)


def decode(name: str, peers: tuple[str, ...] = ("p0", "p1", "b0", "b1"), **fields: object) -> NodeView:
    return view(name, "decode", connected_peers=frozenset(peers), **fields)


def both(name: str, **fields: object) -> NodeView:
    return view(name, "both", connected_peers=frozenset(("p0", "b0", "b1")), **fields)


def prefill(name: str, **fields: object) -> NodeView:
    return view(name, "prefill", **fields)


def view(name: str, role: str, **fields: object) -> NodeView:
    load = {key: fields.pop(key) for key in RequestLoad.__struct_fields__ if key in fields}
    defaults = {"model": "m", "ready": True, "compat_hash": "h", "costs": COSTS}
    return NodeView(name, role, load=msgspec.structs.replace(IDLE, **load), **{**defaults, **fields})  # type: ignore[arg-type]


every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@every_policy
@pytest.mark.parametrize("counter", [0, 1])
def test_stalled_nodes_are_chosen_only_if_all_are(policy: Policy, counter: int) -> None:
    nodes = (decode("d0", stalled=True), decode("d1", requests=50), prefill("p0", stalled=True), prefill("p1"))
    assert policy(FleetSnapshot("m", nodes, counter), ASK).decode == "d1"
    assert policy(FleetSnapshot("m", nodes, counter), ASK).prefill in ("p1", None)
    assert policy(FleetSnapshot("m", nodes[:1], counter), ASK) == Placement("d0", None)


# ------------------------------------------------------------ each policy


def test_round_robin_cycles_through_nodes() -> None:
    nodes = (decode("d0", in_flight=9), decode("d1"), prefill("p0"), prefill("p1", backlog=10_000))
    placements = [round_robin(FleetSnapshot("m", nodes, counter), ASK) for counter in range(3)]
    assert placements == [Placement("d0", "p0"), Placement("d1", "p1"), Placement("d0", "p0")]


def test_least_loaded_counts_requests_of_all_routers() -> None:
    nodes = (decode("d0", requests=3), decode("d1", in_flight=1), prefill("p0", in_flight=2), prefill("p1", requests=1))
    assert least_loaded(FleetSnapshot("m", nodes), ASK) == Placement("d1", "p1")


def test_least_loaded_ties_are_broken_round_robin() -> None:
    nodes = (decode("d0"), decode("d1"), prefill("p0"))
    assert [least_loaded(FleetSnapshot("m", nodes, counter), ASK).decode for counter in range(4)] == [
        "d0",
        "d1",
        "d0",
        "d1",
    ]


def test_prompt_goes_to_the_longest_cached_prefix() -> None:
    nodes = (decode("d0"), prefill("p0"), prefill("p1"))
    for counter in range(4):
        assert prefix_aware(FleetSnapshot("m", nodes, counter), PolicyRequest(4000, {"p1": 3200})) == Placement(
            "d0", "p1"
        )


def test_long_queue_outweighs_a_cached_prefix() -> None:
    nodes = (decode("d0", requests=9, decoding=9), prefill("p0"), prefill("p1", backlog=8000))
    assert prefix_aware(FleetSnapshot("m", nodes), PolicyRequest(4000, {"p1": 3200})) == Placement("d0", "p0")


def test_prompt_cached_on_a_decode_node_is_prefilled_there() -> None:
    nodes = (decode("d0"), decode("d1"), prefill("p0"))
    assert prefix_aware(FleetSnapshot("m", nodes), PolicyRequest(4000, {"d1": 3984})) == Placement("d1", None)


def test_short_prompt_is_handed_off_from_a_busy_decode_node() -> None:
    busy = (decode("d0", requests=60, decoding=60), prefill("p0"))
    idle = (decode("d0"), prefill("p0"))
    assert prefix_aware(FleetSnapshot("m", busy), PolicyRequest(100)) == Placement("d0", "p0")
    assert prefix_aware(FleetSnapshot("m", idle), PolicyRequest(100)) == Placement("d0", None)


@pytest.mark.parametrize("make", [decode, both])
def test_node_that_hands_off_all_computes_prompts_only_without_another(make: Callable[..., NodeView]) -> None:
    node = make("d0", hands_off_all=True)
    short = PolicyRequest(1)
    busy = prefill("p0", backlog=1_000_000)
    assert prefix_aware(FleetSnapshot("m", (node, busy)), short) == Placement("d0", "p0")
    assert prefix_aware(FleetSnapshot("m", (node, prefill("p9"))), short) == Placement("d0", None)
    assert prefix_aware(FleetSnapshot("m", (node, busy)), PolicyRequest(1, {}, False)) == Placement("d0", None)


def test_idle_node_of_both_roles_serves_a_request_alone() -> None:
    nodes = (both("b0"), both("b1"))
    placements = [prefix_aware(FleetSnapshot("m", nodes, counter), ASK) for counter in range(4)]
    assert placements == [Placement("b0", None), Placement("b1", None)] * 2


def test_prompt_goes_to_the_node_that_decodes_least_and_decodes_to_the_one_that_prefills_least() -> None:
    leaning = {"requests": 3, "for_peers": 3, "backlog": 2000, "prompt_share": 0.7}, {"requests": 30, "decoding": 30}
    nodes = (both("b0", **leaning[0]), both("b1", **leaning[1]))
    assert prefix_aware(FleetSnapshot("m", nodes), ASK) == Placement("b1", "b0")


def test_queue_of_the_prefill_node_is_weighed_against_the_sequences_of_the_decode_node() -> None:
    def chosen(decoding: int, backlog: int) -> Placement:
        busy = decode("d0", requests=decoding, decoding=decoding, itl_target=0.05)
        return prefix_aware(FleetSnapshot("m", (busy, prefill("p0", backlog=backlog))), PolicyRequest(2000))

    for decoding, enough in ((2, 500), (20, 10_000), (60, 30_000)):
        assert chosen(decoding, 0) == chosen(decoding, enough // 2) == Placement("d0", "p0")
        assert chosen(decoding, enough) == Placement("d0", None)


def test_nodes_of_all_roles_share_a_load() -> None:
    """The prompt goes where it delays nothing, and decodes where no prompts are."""
    nodes = (
        decode("d0", requests=9, decoding=9),
        prefill("p0", backlog=30_000, prompt_share=1.0),
        both("b0", requests=1, for_peers=1, prompt_share=0.8),
        both("b1", requests=9, decoding=9, prompt_share=0.5),
    )
    assert prefix_aware(FleetSnapshot("m", nodes), ASK) == Placement("d0", "b0")


def test_streams_avoid_the_nodes_on_which_prompts_will_settle() -> None:
    """The first nodes by id, though all of them have the same share now; all nodes if streams are many."""
    few = tuple(both(f"b{number}", requests=20, decoding=20, prompt_share=0.3) for number in range(2))
    assert prompt_shares(FleetSnapshot("m", few), COSTS) == {"b0": pytest.approx(0.6), "b1": pytest.approx(0.0)}
    assert prefix_aware(FleetSnapshot("m", few), ASK).decode == "b1"
    many = tuple(both(f"b{number}", requests=250, decoding=250, prompt_share=0.05) for number in range(2))
    assert prompt_shares(FleetSnapshot("m", many), COSTS) == {"b0": pytest.approx(0.05), "b1": pytest.approx(0.05)}


def test_nodes_without_streams_share_prompts_though_the_measured_base_of_a_decode_is_zero() -> None:
    costs = StepCosts(prompt=COSTS.prompt, decode=LinearCost(0.0, 20e-6), read=COSTS.read)
    nodes = both("b0", costs=costs, backlog=4000), both("b1", costs=costs)
    assert prefix_aware(FleetSnapshot("m", nodes), ASK).decode in ("b0", "b1")


def test_streams_spread_over_all_nodes_once_prompts_queue_up_on_the_first() -> None:
    """A node spends all of its time on prompts at most: what it lacks is seen in its queue."""
    peers = both("b0", prompt_share=0.9), both("b1", requests=600, decoding=600, prompt_share=0.3)
    lean = prompt_shares(FleetSnapshot("m", peers), COSTS)
    assert lean == {"b0": pytest.approx(0.9), "b1": pytest.approx(0.3)}
    queued = both("b0", requests=20, for_peers=20, prompt_share=0.9, backlog=40_000), peers[1]
    even = prompt_shares(FleetSnapshot("m", queued), COSTS)
    assert even["b0"] == pytest.approx(even["b1"])
    assert sum(even.values()) == pytest.approx(1.2 + 1.0 / (200 * 11e-3))  # 1 s waits, a stream takes 200 steps
    assert prefix_aware(FleetSnapshot("m", queued), ASK).decode == "b0"


@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    streams=st.integers(0, 3000),
    base=st.floats(1e-3, 0.1),
    slope=st.floats(0.0, 1e-3),
)
def test_settled_shares_keep_the_work_and_never_decode_slower(
    shares: list[float], streams: int, base: float, slope: float
) -> None:
    decode = LinearCost(base, slope)
    nodes = len(shares)
    settled = settled_shares(sum(shares), streams, nodes, msgspec.structs.replace(COSTS, decode=decode), itl_target=0.0)
    assert len(settled) == nodes
    assert sum(settled) == pytest.approx(sum(shares))
    assert settled == sorted(settled, reverse=True) or min(settled) == pytest.approx(max(settled))
    even = time_per_token(decode, streams / nodes, sum(shares) / nodes)
    decoding = sum(share == settled[-1] for share in settled)
    assert time_per_token(decode, streams / decoding, settled[-1]) <= even * (1.0 + 1e-9)


@given(
    work=st.floats(0.0, 12.0),
    streams=st.integers(1, 3000),
    nodes=st.integers(2, 12),
    base=st.floats(1e-3, 0.1),
    slope=st.floats(0.0, 1e-3),
    target=st.floats(1e-3, 1.0),
)
def test_streams_settle_where_they_get_a_token_per_itl_target(
    work: float, streams: int, nodes: int, base: float, slope: float, target: float
) -> None:
    """The target is at least two decode steps."""
    decode = LinearCost(base, slope)
    settled = settled_shares(work, streams, nodes, msgspec.structs.replace(COSTS, decode=decode), target)
    decoding = sum(share == settled[-1] for share in settled)
    step = decode.at(streams / decoding)
    assert step / (1.0 - settled[-1]) <= max(target, 2.0 * step) * (1.0 + 1e-9)


def test_more_nodes_than_needed_compute_prompts_while_streams_are_few() -> None:
    """A few streams fit on few nodes, and prompts wait less for one of many nodes."""
    few, many = (settled_shares(9.2, streams, 16, COSTS, 0.04) for streams in (20, 1500))
    assert sum(share > 0.5 for share in few) >= 12
    assert sum(share > 0.5 for share in many) <= 10


def test_node_that_finds_streams_to_cost_nothing_does_not_get_all_of_them() -> None:
    """The node's steps had about equal numbers of streams."""
    measured = COSTS.decode.at(45)
    flat = msgspec.structs.replace(COSTS, decode=LinearCost(measured))
    others = [decode(f"d{i}", requests=45, decoding=45, costs=COSTS) for i in range(3)]
    full = decode("d3", requests=60, decoding=45, costs=flat)
    assert prefix_aware(FleetSnapshot("m", (*others, full)), ASK).decode != "d3"
    free = decode("d3", requests=30, decoding=30, costs=msgspec.structs.replace(COSTS, decode=LinearCost(5.6e-3)))
    assert prefix_aware(FleetSnapshot("m", (*others, free)), ASK).decode == "d3"


def test_node_that_was_measured_after_the_typical_costs_is_usable_though_they_have_no_base() -> None:
    typical = msgspec.structs.replace(COSTS, decode=LinearCost(0.0, 20e-6))
    nodes = decode("d0", costs=COSTS), decode("d1", requests=5, decoding=5, costs=typical)
    assert prefix_aware(FleetSnapshot("m", nodes, typical=typical), ASK).decode == "d0"


def test_slow_decode_node_gets_fewer_streams() -> None:
    slow = msgspec.structs.replace(COSTS, decode=LinearCost(0.015, 60e-6))
    nodes = decode("d0", requests=10, decoding=10, costs=slow), decode("d1", requests=14, decoding=14, costs=COSTS)
    assert prefix_aware(FleetSnapshot("m", nodes), ASK).decode == "d1"


@pytest.mark.parametrize(("streams", "queues"), [(40, (30_000, 20_000)), (60, (30_000, 20_000))])
def test_under_overload_all_nodes_do_both_and_keep_the_prompts_of_their_streams(
    streams: int, queues: tuple[int, int]
) -> None:
    nodes = tuple(
        both(f"b{i}", requests=streams, decoding=streams, prompt_share=0.65, backlog=queue, itl_target=0.04)
        for i, queue in enumerate(queues)
    )
    shares = prompt_shares(FleetSnapshot("m", nodes), COSTS)
    assert shares["b0"] == pytest.approx(shares["b1"])
    assert prefix_aware(FleetSnapshot("m", nodes), ASK) == Placement("b1", None)


def test_full_decode_node_is_avoided() -> None:
    nodes = (decode("d0", free_blocks=10), decode("d1", requests=100), prefill("p0"))
    assert prefix_aware(FleetSnapshot("m", nodes), ASK).decode == "d1"


def test_slow_node_gets_fewer_requests() -> None:
    slow = StepCosts(prompt=LinearCost(5e-3, 100e-6), decode=COSTS.decode, read=COSTS.read)
    nodes = (decode("d0", requests=9, decoding=9), prefill("p0", costs=slow), prefill("p1", backlog=3000))
    assert prefix_aware(FleetSnapshot("m", nodes), ASK) == Placement("d0", "p1")


def test_slow_read_throughput_is_tried_again_after_a_while() -> None:
    """Otherwise no read would ever measure it again."""
    slow = LinearCost(0.0, 2e-3)
    for age, prefill_node in ((0.0, None), (120.0, "p0")):
        costs = msgspec.structs.replace(COSTS, read=slow.aged(age))
        nodes = (decode("d0", costs=costs, requests=9, decoding=9), prefill("p0"))
        assert prefix_aware(FleetSnapshot("m", nodes), ASK).prefill == prefill_node


def test_unmeasured_costs_default_to_the_mean() -> None:
    slow = StepCosts(prompt=LinearCost(5e-3, 1e-3), decode=COSTS.decode, read=COSTS.read)
    nodes = (
        decode("d0", costs=StepCosts(), requests=9, decoding=9),
        prefill("p0", costs=slow),
        prefill("p1", costs=StepCosts()),
    )
    assert {prefix_aware(FleetSnapshot("m", nodes, counter), ASK).prefill for counter in range(2)} == {"p0", "p1"}


@every_policy
@pytest.mark.parametrize(
    "unusable",
    [
        prefill("p0", ready=False),
        prefill("p0", model="x"),
        prefill("p0", compat_hash="y"),
        prefill("p0", protocol=PROTOCOL_VERSION + 1),
        prefill("stranger"),
    ],
)
def test_decode_node_prefills_without_a_compatible_prefill_node(policy: Policy, unusable: NodeView) -> None:
    assert policy(FleetSnapshot("m", (decode("d0"), unusable)), ASK) == Placement("d0", None)


def test_nodes_of_unequal_protocols_are_not_compatible() -> None:
    for protocol, compatible in ((-1, False), (0, True), (1, False)):
        node = prefill("p0", protocol=PROTOCOL_VERSION + protocol)
        assert decode("d0").reads_from(node) == compatible


@every_policy
@pytest.mark.parametrize("nodes", [(), (prefill("p0"),), (decode("d0", ready=False),)])
def test_no_ready_decode_node_is_overloaded(policy: Policy, nodes: tuple[NodeView, ...]) -> None:
    with pytest.raises(Overloaded, match="'m'"):
        policy(FleetSnapshot("m", nodes), ASK)


def test_error_names_the_served_models() -> None:
    with pytest.raises(Overloaded, match="no decode node of model 'x' is ready; the ready ones serve 'm'"):
        least_loaded(FleetSnapshot("x", (decode("d0"),)), ASK)


# ------------------------------------------------------------ pulls


def reading_prefill(name: str, *peers: str, **fields: object) -> NodeView:
    return prefill(name, connected_peers=frozenset(peers), **fields)


def test_prefill_node_pulls_the_history_that_a_busy_decode_node_has() -> None:
    nodes = (decode("d0", requests=60, decoding=60), reading_prefill("p0", "d0"))
    request = PolicyRequest(12_000, {"d0": 11_008})
    assert prefix_aware(FleetSnapshot("m", nodes), request) == Placement("d0", "p0", "d0", 11_008)
    unconnected = (nodes[0], prefill("p0"))
    assert prefix_aware(FleetSnapshot("m", unconnected), request) == Placement("d0", None)


def test_free_prefill_node_pulls_from_a_busy_one() -> None:
    nodes = (decode("d0"), reading_prefill("p0", "p1"), prefill("p1", backlog=100_000))
    request = PolicyRequest(12_000, {"p1": 11_008}, prefills=frozenset({"p0", "p1"}))
    assert prefix_aware(FleetSnapshot("m", nodes), request) == Placement("d0", "p0", "p1", 11_008)


def test_options_of_a_trace_have_what_was_chosen_and_the_same_without_a_pull() -> None:
    nodes = (decode("d0", requests=60, decoding=60), reading_prefill("p0", "d0"))
    snapshot = FleetSnapshot("m", nodes)
    ask = PolicyRequest(12_000, {"d0": 11_008})
    chosen = prefix_aware(snapshot, ask)
    options = compared_options(snapshot, ask, chosen)
    assert (options[0].decode, options[0].prefill, options[0].source) == (chosen.decode, chosen.prefill, chosen.source)
    assert options[1][1:] == (chosen.decode, chosen.prefill, None)
    assert options[0].seconds < options[1].seconds
    assert all(option.seconds >= options[0].seconds for option in options)
    assert str(options[0]).endswith("s: decode on d0, prefill on p0, pulled from d0")


def test_options_of_a_trace_begin_with_what_was_chosen_in_any_fleet() -> None:
    """Then come options of the same decode node, and few others."""
    chance = random.Random(1)
    for _ in range(50):
        nodes = tuple(decode(f"d{index}", decoding=chance.randrange(60)) for index in range(20))
        nodes += tuple(reading_prefill(f"p{index}", "d1", "d2") for index in range(chance.randrange(4)))
        objective = chance.choice([math.inf, 0.2, 0.001])
        snapshot = FleetSnapshot("m", nodes, counter=chance.randrange(9))
        ask = PolicyRequest(12_000, {"d1": 11_008}, ttft=objective, tpot=objective / 10)
        chosen = prefix_aware(snapshot, ask)
        options = compared_options(snapshot, ask, chosen)
        assert (options[0].decode, options[0].prefill, options[0].source) == (
            chosen.decode,
            chosen.prefill,
            chosen.source,
        )
        same = [option.decode == chosen.decode for option in options]
        assert same == sorted(same, reverse=True)
        assert len(options) == 6


def test_decode_node_pulls_what_it_computes_itself() -> None:
    nodes = (decode("d0", ("d1",)), decode("d1", requests=200, decoding=200))
    assert prefix_aware(FleetSnapshot("m", nodes), PolicyRequest(12_000, {"d1": 11_008})) == Placement(
        "d0", None, "d1", 11_008
    )


@pytest.mark.parametrize(
    ("num_cached", "read"),
    [(320, LinearCost(1e-3, 1e-6)), (11_008, LinearCost(1e-3, 200e-6)), (11_008, LinearCost(0.4, 1e-6))],
    ids=["few tokens", "slow path", "slow start"],
)
def test_what_is_not_clearly_faster_is_not_pulled(num_cached: int, read: LinearCost) -> None:
    costs = StepCosts(COSTS.prompt, COSTS.decode, read)
    nodes = (decode("d0", requests=60, decoding=60), reading_prefill("p0", "d0", costs=costs))
    assert prefix_aware(FleetSnapshot("m", nodes), PolicyRequest(12_000, {"d0": num_cached})).source is None


@pytest.mark.parametrize(("windows", "source"), [((None,), "d0"), ((None, 128), None)], ids=["full", "windows"])
def test_node_pulls_a_part_of_what_it_reads_as_fast_as_it_computes(windows: Windows, source: str | None) -> None:
    """Not with windows, whose place in a pull is not known before its end."""
    costs = StepCosts(COSTS.prompt, COSTS.decode, LinearCost(1e-3, 20e-6))
    nodes = (decode("d0", requests=60, decoding=60), reading_prefill("p0", "d0", costs=costs, windows=windows))
    assert prefix_aware(FleetSnapshot("m", nodes), PolicyRequest(12_000, {"d0": 11_008})).source == source


@pytest.mark.parametrize("fields", [{"ready": False}, {"stalled": True}, {"compat_hash": "other"}, {"model": "other"}])
def test_only_a_node_that_serves_and_is_compatible_is_a_source(fields: dict[str, object]) -> None:
    nodes = (decode("d0"), reading_prefill("p0", "p1"), prefill("p1", **fields))
    request = PolicyRequest(12_000, {"p1": 11_008}, prefills=frozenset({"p0"}))
    assert prefix_aware(FleetSnapshot("m", nodes), request) == Placement("d0", "p0")


# ------------------------------------------------------------ all fleets

lines = st.builds(LinearCost, st.floats(0, 0.1), st.floats(0, 1e-3))
loads = st.builds(
    RequestLoad,
    requests=st.integers(0, 300),
    waiting=st.integers(0, 10),
    decoding=st.integers(0, 300),
    for_peers=st.integers(0, 300),
    prompt_share=st.floats(0, 1),
    itl_target=st.floats(0, 0.1),
    ttft_target=st.floats(0, 1.0),
    backlog=st.integers(0, 100_000),
    free_blocks=st.integers(0, 1000),
    total_blocks=st.just(1000),
    block_size=st.sampled_from([16, 64]),
)
views = st.builds(
    NodeView,
    node_id=st.sampled_from("abcdefgh"),
    role=st.sampled_from(["prefill", "decode", "both"]),
    model=st.sampled_from("mx"),
    ready=st.booleans(),
    compat_hash=st.sampled_from("hk"),
    protocol=st.sampled_from([0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION]),
    in_flight=st.integers(0, 3),
    connected_peers=st.frozensets(st.sampled_from("abcdefgh")),
    load=loads,
    costs=st.builds(StepCosts, lines, lines, lines),
)
snapshots = st.builds(
    FleetSnapshot,
    model=st.just("m"),
    nodes=st.lists(views, max_size=8, unique_by=lambda view: view.node_id).map(tuple),
    counter=st.integers(0, 2**32),
)


@st.composite
def asks(draw: st.DrawFn) -> PolicyRequest:
    num_tokens = draw(st.integers(1, 20_000))
    cached = draw(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, num_tokens - 1)))
    return PolicyRequest(num_tokens, cached, draw(st.booleans()))


@every_policy
@given(snapshot=snapshots, ask=asks())
def test_only_ready_compatible_nodes_are_paired(policy: Policy, snapshot: FleetSnapshot, ask: PolicyRequest) -> None:
    usable = snapshot.usable("decode")
    if not usable:
        return
    placement = policy(snapshot, ask)
    assert policy(snapshot, ask) == placement
    chosen = next(node for node in snapshot.nodes if node.node_id == placement.decode)
    assert chosen in usable
    assert chosen.decodes
    if placement.prefill is not None:
        assert ask.may_hand_off
        assert placement.prefill != placement.decode
        peer = next(node for node in snapshot.nodes if node.node_id == placement.prefill)
        assert (peer.prefills, peer.ready, peer.model) == (True, True, "m")
        assert peer.compat_hash == chosen.compat_hash
        assert peer.protocol == chosen.protocol
        assert peer.node_id in chosen.connected_peers


@given(snapshot=snapshots, ask=asks())
def test_pulls_are_from_connected_nodes_that_have_more(snapshot: FleetSnapshot, ask: PolicyRequest) -> None:
    if not snapshot.usable("decode"):
        return
    placement = prefix_aware(snapshot, ask)
    if placement.source is None:
        assert placement.source_tokens == 0
        return
    nodes = {node.node_id: node for node in snapshot.nodes}
    reader = nodes[placement.prefill or placement.decode]
    source = nodes[placement.source]
    assert ask.may_hand_off
    assert reader.reads_from(source)
    assert (source.ready, source.stalled, source.model) == (True, False, "m")
    assert ask.cached[source.node_id] == placement.source_tokens > ask.cached.get(reader.node_id, 0)


# ---------------------------------------------------------------- reports of any numbers

in_range = st.sampled_from([0.0, 5e-324, 1e-300, 1e-19, 1e-9, 0.005, 1.0, 1e6])
numbers = st.sampled_from([-1e-19, -23.7, 1e308, math.inf, -math.inf, math.nan]) | st.floats()
counts = st.sampled_from([0, 1, 45, 1 << 32, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)
any_lines = lines | st.builds(LinearCost, in_range, in_range) | st.builds(LinearCost, numbers, numbers)
any_views = st.builds(
    NodeView,
    node_id=st.sampled_from("abcdefgh"),
    role=st.sampled_from(["prefill", "decode", "both"]),
    model=st.just("m"),
    ready=st.just(True),
    stalled=st.booleans(),
    hands_off_all=st.booleans(),
    connected_peers=st.just(frozenset("abcdefgh")),
    load=st.builds(
        RequestLoad,
        requests=counts,
        waiting=counts,
        decoding=counts,
        for_peers=counts,
        backlog=counts,
        free_blocks=counts,
        total_blocks=counts,
        prompt_share=st.floats(0.0, 1.0) | numbers,
        itl_target=in_range | numbers,
        ttft_target=in_range | numbers,
    ),
    costs=st.builds(StepCosts, any_lines, any_lines, any_lines),
)
any_snapshots = st.builds(
    FleetSnapshot,
    model=st.just("m"),
    nodes=st.lists(views | any_views, max_size=6, unique_by=lambda view: view.node_id).map(tuple),
    counter=st.integers(0, 2**32),
)


@every_policy
@given(snapshot=any_snapshots, ask=asks())
def test_reports_of_any_numbers_give_a_placement(policy: Policy, snapshot: FleetSnapshot, ask: PolicyRequest) -> None:
    moves(snapshot)
    with contextlib.suppress(Overloaded):
        pooling_node(PREFIX_AWARE, snapshot, "generate", ask.num_tokens)
    if usable := snapshot.usable("decode"):
        placement = policy(snapshot, ask)
        assert placement.decode in [node.node_id for node in usable]
        for option in compared_options(snapshot, ask, placement):
            assert math.isfinite(option.seconds)


LEAST = LinearCost(0.0, 5e-324)


@pytest.mark.parametrize("prompt", [COSTS.prompt, LEAST], ids=["prompts", "all"])
def test_costs_of_almost_no_time_give_a_placement(prompt: LinearCost) -> None:
    """Quotients of them exceed all numbers."""
    fields = {
        "costs": StepCosts(prompt, LEAST, LEAST),
        "requests": 1,
        "decoding": 1,
        "itl_target": LEAST.slope,
        "ttft_target": LEAST.slope,
    }
    nodes = tuple(both(name, backlog=4000, prompt_share=0.5, **fields) for name in ("b0", "b1"))
    for typical in (None, COSTS, StepCosts(LEAST, LEAST, LEAST)):
        snapshot = FleetSnapshot("m", nodes, typical=typical)
        assert prefix_aware(snapshot, PolicyRequest(4000, {"b1": 3200})).decode in ("b0", "b1")
        assert moves(snapshot) == []


@pytest.mark.parametrize("bad", [-1e-3, math.nan, math.inf, 1e308])
@pytest.mark.parametrize("name", ["prompt", "decode", "read", "prompt_share", "itl_target", "ttft_target"])
def test_node_without_a_price_gets_no_request_while_another_one_has_one(name: str, bad: float) -> None:
    fields: dict[str, Any] = {name: bad} if name in RequestLoad.__struct_fields__ else {}
    costs = COSTS if fields else msgspec.structs.replace(COSTS, **{name: LinearCost(0.005, bad)})
    liar = decode("d0", costs=costs, **fields)
    busy = decode("d1", requests=40, decoding=40)
    for counter in range(2):
        assert prefix_aware(FleetSnapshot("m", (liar, busy), counter), ASK).decode == "d1"
        assert prefix_aware(FleetSnapshot("m", (liar,), counter), ASK).decode == "d0", "it serves though"
    few, many = (decode(f"d{number}", costs=costs, requests=number, **fields) for number in (3, 9))
    assert prefix_aware(FleetSnapshot("m", (many, few)), ASK).decode == "d3", "load alone decides"
    prefills = view("p0", "prefill", costs=costs, **fields), prefill("p1", backlog=9000)
    assert prefix_aware(FleetSnapshot("m", (decode("d1", hands_off_all=True), *prefills)), ASK).prefill == "p1"
    (unpriced,) = price((liar, busy), COSTS)[1]
    assert unpriced.node_id == "d0"
    assert name in str(unpriced.reason)


@dataclass(frozen=True)
class Burden:
    """Values that make a node a worse choice."""

    requests: int
    backlog: int
    blocks: int
    uncached: int


burdens = st.builds(Burden, st.integers(0, 100), st.integers(0, 9000), st.integers(0, 700), st.integers(0, 3000))


def burdened(node: NodeView, burden: Burden) -> NodeView:
    load = msgspec.structs.replace(
        node.load,
        requests=node.load.requests + burden.requests,
        backlog=node.load.backlog + burden.backlog,
        free_blocks=node.load.free_blocks - burden.blocks,
    )
    return msgspec.structs.replace(node, load=load)


@given(burden=burdens, counter=st.integers(0, 99))
def test_dominated_node_is_not_chosen(burden: Burden, counter: int) -> None:
    """The difference exceeds the slack within which costs count as equal."""
    cached = {"p0": 3008, "d0": 3008, "p1": 3008 - burden.uncached, "d1": 3008 - burden.uncached}
    clearly = Burden(burden.requests + 200, burden.backlog + 2000, burden.blocks, burden.uncached)
    nodes = (burdened(decode("d1"), clearly), decode("d0"), burdened(prefill("p1"), clearly), prefill("p0"))
    placement = prefix_aware(FleetSnapshot("m", nodes, counter), PolicyRequest(4000, cached))
    assert placement.decode == "d0"
    assert placement.prefill in (None, "p0")


@given(before=burdens, more=burdens, counter=st.integers(0, 99), cached=st.integers(0, 3999))
def test_added_load_never_attracts_requests(before: Burden, more: Burden, counter: int, cached: int) -> None:
    """For one P and D without ties."""

    def chooses_p1(burden: Burden) -> bool:
        node = burdened(prefill("p1"), burden)
        nodes = (decode("d0", requests=90), prefill("p0", backlog=3000), node)
        return prefix_aware(FleetSnapshot("m", nodes, counter), PolicyRequest(4000, {"p1": cached})).prefill == "p1"

    both = Burden(before.requests + more.requests, before.backlog + more.backlog + 200, before.blocks, 0)
    assert chooses_p1(before) or not chooses_p1(both)


# ---------------------------------------------------------------- what a scheduler in front asks for


@every_policy
def test_named_prefill_node_computes_the_prompt(policy: Policy) -> None:
    nodes = (decode("d0"), prefill("p0", backlog=500_000), prefill("p1"))
    for counter in range(3):
        request = msgspec.structs.replace(ASK, prefills=frozenset({"p0"}))
        assert policy(FleetSnapshot("m", nodes, counter), request) == Placement("d0", "p0")


@every_policy
def test_named_prefill_node_that_is_out_of_reach_leaves_the_prompt_to_d(policy: Policy) -> None:
    nodes = (decode("d0", peers=("p1",)), prefill("p0"), prefill("p1"))
    request = msgspec.structs.replace(ASK, prefills=frozenset({"p0"}))
    assert policy(FleetSnapshot("m", nodes), request) == Placement("d0", None)


def test_objective_for_the_first_token_overrules_the_cost() -> None:
    nodes = (decode("d0", decoding=40, requests=40, itl_target=0.01), prefill("p0", backlog=40_000))
    snapshot = FleetSnapshot("m", nodes)
    assert prefix_aware(snapshot, ASK).prefill == "p0"
    assert prefix_aware(snapshot, msgspec.structs.replace(ASK, ttft=0.5)) == Placement("d0", None)


def test_objective_for_the_time_per_token_overrules_the_cost() -> None:
    slow = StepCosts(COSTS.prompt, LinearCost(30e-3, 20e-6), COSTS.read)
    nodes = (decode("d0", costs=slow), decode("d1", backlog=400_000))
    snapshot = FleetSnapshot("m", nodes)
    assert prefix_aware(snapshot, ASK).decode == "d0"
    assert prefix_aware(snapshot, msgspec.structs.replace(ASK, tpot=20e-3)).decode == "d1"


def test_objectives_that_no_node_meets_are_missed_by_the_least() -> None:
    nodes = tuple(decode(f"d{index}", backlog=backlog) for index, backlog in enumerate((90_000, 20_000, 60_000)))
    request = msgspec.structs.replace(ASK, ttft=1e-6, tpot=1e-6)
    assert prefix_aware(FleetSnapshot("m", nodes), request).decode == "d1"
