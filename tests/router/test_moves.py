"""Streams that move between nodes, as a function of a snapshot."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdserve.request_cost import TYPICAL, RequestLoad
from router.fleet.moves import Move, moves
from router.fleet.policy import FleetSnapshot, NodeView


def node(name: str, decoding: int, prompt_share: float = 0.0, own: int = -1, backlog: int = 0) -> NodeView:
    """A node that decodes; ``own`` of its sequences are this router's, -1: all."""
    load = RequestLoad(
        requests=decoding,
        decoding=decoding,
        backlog=backlog,
        free_blocks=1000,
        total_blocks=1000,
        prompt_share=prompt_share,
        itl_target=0.04,
    )
    peers = frozenset(("a", "b", "c", "d"))
    in_flight = decoding if own < 0 else own
    return NodeView(name, "both", "m", True, "h", 6, peers, in_flight, load=load, costs=TYPICAL)


def found(*nodes: NodeView) -> list[Move]:
    return moves(FleetSnapshot("m", nodes))


def test_streams_leave_a_node_that_leans_to_prefill() -> None:
    (move,) = found(node("a", 8, prompt_share=0.3), node("b", 2))
    assert move == Move("a", "b", 8)


def test_streams_move_to_the_node_where_they_cost_least_not_to_an_empty_one_that_leans_to_prefill() -> None:
    (move,) = found(node("a", 20, prompt_share=0.9), node("b", 0, prompt_share=0.9), node("c", 5))
    assert (move.source, move.target) == ("a", "c")


def test_no_stream_moves_where_its_pause_would_be_longer_than_the_gap_that_prompts_cause() -> None:
    assert found(node("a", 8, prompt_share=0.3, backlog=4000), node("b", 2))
    assert not found(node("a", 8, prompt_share=0.3, backlog=4000), node("b", 2, backlog=4000))


def test_no_stream_moves_to_a_node_amid_a_long_step_of_prompts() -> None:
    """A node without streams computes all prompts that wait in one step."""
    (move,) = found(node("a", 4, prompt_share=0.3), node("b", 0))
    assert move == Move("a", "b", 4)
    assert found(node("a", 4, prompt_share=0.3), node("b", 0, backlog=8192)) == []


def test_the_last_streams_leave_a_node_of_prompts_for_one_that_computes_some_too() -> None:
    assert found(node("a", 2, prompt_share=0.9, backlog=4000), node("b", 8, 0.3, backlog=4000)) == [Move("a", "b", 2)]


def test_decodes_are_balanced() -> None:
    (move,) = found(node("a", 200), node("b", 40))
    assert (move.source, move.target) == ("a", "b")
    assert 0 < move.streams <= 80


def test_nothing_moves_at_low_load_or_in_balance() -> None:
    assert not found(node("a", 2, prompt_share=0.01), node("b", 0))
    assert not found(node("a", 0, prompt_share=0.3), node("b", 3))
    assert not found(node("a", 150, prompt_share=0.1), node("b", 154, prompt_share=0.1))
    assert not found(node("a", 200))


def test_each_router_moves_its_share() -> None:
    target = node("b", 2)
    assert found(node("a", 8, 0.3, own=2), target) == [Move("a", "b", 2)]
    assert not found(node("a", 8, 0.3, own=0), target)


def test_streams_move_only_between_nodes_that_read_from_each_other() -> None:
    stranger = msgspec.structs.replace(node("b", 2), compat_hash="k")
    assert not found(node("a", 8, prompt_share=0.3), stranger)


nodes = st.builds(node, st.just("x"), st.integers(0, 250), st.floats(0, 1), backlog=st.integers(0, 20_000))


@given(st.lists(nodes, min_size=2, max_size=4))
def test_streams_do_not_move_back(fleet: list[NodeView]) -> None:
    views = {name: msgspec.structs.replace(view, node_id=name) for name, view in zip("abcd", fleet, strict=False)}
    ways = set[tuple[str, str]]()
    for _ in range(500):
        chosen = moves(FleetSnapshot("m", tuple(views.values())))
        if not chosen:
            return
        for source, target, count in chosen:
            assert (target, source) not in ways
            ways.add((source, target))
            for name, change in ((source, -count), (target, count)):
                load = views[name].load
                moved = load.decoding + change
                load = msgspec.structs.replace(load, requests=moved, decoding=moved)
                views[name] = msgspec.structs.replace(views[name], load=load, in_flight=moved)
    raise AssertionError("streams still move after 500 rounds of reports")
