"""The choice of nodes, as a function of a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from router.policy import NodeView, Placement, Snapshot, choose


def decode(name: str, peers: tuple[str, ...] = ("p0", "p1"), **fields: object) -> NodeView:
    return NodeView(name, "decode", "m", True, "h", connected_peers=frozenset(peers), **fields)  # type: ignore[arg-type]


def prefill(name: str, **fields: object) -> NodeView:
    defaults: dict[str, object] = {"model": "m", "ready": True, "compat_hash": "h"}
    return NodeView(name, "prefill", **{**defaults, **fields})  # type: ignore[arg-type]


def test_the_least_loaded_of_each_role() -> None:
    nodes = (decode("d0", in_flight=3), decode("d1", in_flight=1), prefill("p0", in_flight=2), prefill("p1"))
    assert choose(Snapshot("m", nodes)) == Placement("d1", "p1")


def test_ties_go_round() -> None:
    nodes = (decode("d0"), decode("d1"), prefill("p0"))
    assert [choose(Snapshot("m", nodes, turn)).decode for turn in range(4)] == ["d0", "d1", "d0", "d1"]


@pytest.mark.parametrize(
    "unusable",
    [prefill("p0", ready=False), prefill("p0", model="x"), prefill("p0", compat_hash="y"), prefill("stranger")],
)
def test_without_a_prefill_node_that_fits_the_decode_node_prefills(unusable: NodeView) -> None:
    assert choose(Snapshot("m", (decode("d0"), unusable))) == Placement("d0", None)


@pytest.mark.parametrize("nodes", [(), (prefill("p0"),), (NodeView("d0", "decode", "m", False),)])
def test_without_a_decode_node_there_is_no_service(nodes: tuple[NodeView, ...]) -> None:
    with pytest.raises(Overloaded, match="'m'"):
        choose(Snapshot("m", nodes))


def test_the_models_that_are_served_are_named() -> None:
    with pytest.raises(Overloaded, match="no decode node of model 'x' is ready; the ready ones serve 'm'"):
        choose(Snapshot("x", (decode("d0"),)))


views = st.builds(
    NodeView,
    node_id=st.sampled_from("abcdefgh"),
    role=st.sampled_from(["prefill", "decode"]),
    model=st.sampled_from("mx"),
    ready=st.booleans(),
    compat_hash=st.sampled_from("hk"),
    in_flight=st.integers(0, 3),
    connected_peers=st.frozensets(st.sampled_from("abcdefgh")),
)


@given(st.lists(views, max_size=8, unique_by=lambda view: view.node_id), st.integers(0, 100))
def test_only_ready_nodes_that_fit_each_other_are_paired(nodes: list[NodeView], turn: int) -> None:
    usable = [node for node in nodes if node.role == "decode" and node.ready and node.model == "m"]
    if not usable:
        return
    placement = choose(Snapshot("m", tuple(nodes), turn))
    chosen = next(node for node in nodes if node.node_id == placement.decode)
    assert chosen in usable
    assert chosen.in_flight == min(node.in_flight for node in usable)
    if placement.prefill is not None:
        peer = next(node for node in nodes if node.node_id == placement.prefill)
        assert (peer.role, peer.ready, peer.model) == ("prefill", True, "m")
        assert peer.compat_hash == chosen.compat_hash
        assert peer.node_id in chosen.connected_peers
