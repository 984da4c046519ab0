"""Prompts go to nodes that have the embeddings of their images, unless these nodes are too busy."""

from __future__ import annotations

import random
from functools import reduce
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PeerError
from pdserve.images import EncodingCost, ImageInput, ImageSpan
from pdserve.pb import pdserve_pb2 as pb
from pdserve.request_cost import LinearCost, RequestLoad, StepCosts
from pdserve.rpc.message_limits import MAX_REPORTED_IMAGES
from router.fleet.image_index import HeldImages, ImageCosts, PromptImages
from router.fleet.policy import FleetSnapshot, NodeView, Placement, PolicyRequest, prefix_aware

INPUT = ImageInput(1, 16, 2, 4 * 32**2, 16384 * 32**2, bytes(32))
IMAGE_COSTS = ImageCosts(INPUT, EncodingCost(2.0, 0.0))
COSTS = StepCosts(prompt=LinearCost(5e-3, 25e-6), decode=LinearCost(5e-3, 20e-6), read=LinearCost(1e-3, 1e-6))
SCREEN = ImageSpan(100, 32, 64, b"screen".ljust(32))  # 2,048 tokens: 0.1 s to encode
OTHER = ImageSpan(3000, 10, 10, b"other".ljust(32))
TOKENS = 4000


def prefill(name: str, backlog: int = 0) -> NodeView:
    load = RequestLoad(free_blocks=1000, total_blocks=1000, backlog=backlog)
    return NodeView(name, "prefill", "m", True, "h", costs=COSTS, load=load, images=INPUT, image_costs=IMAGE_COSTS)


def decode() -> NodeView:
    """A node without a tower, as ImageNodes passes it."""
    load = RequestLoad(free_blocks=1000, total_blocks=1000)
    peers = frozenset(("p0", "p1"))
    return NodeView("d", "decode", "m", True, "h", connected_peers=peers, costs=COSTS, load=load, hands_off_all=True)


def ask(held: dict[str, frozenset[bytes]], cached: dict[str, int] | None = None) -> PolicyRequest:
    return PolicyRequest(TOKENS, cached or {}, images=PromptImages((SCREEN, OTHER), held))


def placements(request: PolicyRequest, *backlogs: int) -> set[Placement]:
    nodes = (decode(), *(prefill(f"p{index}", backlog) for index, backlog in enumerate(backlogs)))
    return {prefix_aware(FleetSnapshot("m", nodes, counter), request) for counter in range(4)}


HAS_SCREEN = {"p1": frozenset({SCREEN.digest})}


def test_prompt_goes_to_the_node_with_the_embeddings() -> None:
    assert placements(ask({}), 0, 0) == {Placement("d", "p0"), Placement("d", "p1")}
    assert placements(ask(HAS_SCREEN), 0, 0) == {Placement("d", "p1")}


def test_embeddings_are_worth_their_work_and_no_more() -> None:
    """Encoding takes as long as 4,096 tokens of a prompt. On average, half of a queue in one step is left."""
    assert placements(ask(HAS_SCREEN), 0, 7400) == {Placement("d", "p1")}
    assert placements(ask(HAS_SCREEN), 0, 9000) == {Placement("d", "p0")}


def test_cached_prefix_and_embeddings_are_compared_by_work() -> None:
    assert placements(ask(HAS_SCREEN, {"p0": 96}), 0, 0) == {Placement("d", "p1")}
    assert placements(ask(HAS_SCREEN, {"p0": 2992}), 0, 0) == {Placement("d", "p0")}, "its prefix has the screen"


def test_embeddings_behind_the_cached_prefix_count_only() -> None:
    request = ask({"p0": frozenset({SCREEN.digest})}, {"p0": 2992, "p1": 2992})
    assert placements(request, 0, 0) == {Placement("d", "p0"), Placement("d", "p1")}


def test_work_counts_each_distinct_image_once_and_none_of_text_nodes() -> None:
    again = ImageSpan(3500, SCREEN.rows, 1, SCREEN.digest)
    request = PolicyRequest(TOKENS, {"p0": 2992}, images=PromptImages((SCREEN, OTHER, again)))
    assert request.to_compute(prefill("p0")) == TOKENS - 2992 + 2 * (100 + 32)
    assert request.to_compute(prefill("p1")) == TOKENS + 2 * (100 + 32)
    assert request.to_compute(prefill("p1"), pulled=3600) == 400
    assert request.to_compute(decode()) == TOKENS


@given(st.randoms(use_true_random=False), st.integers(0, 20_000), st.integers(0, 20_000))
def test_the_least_work_ahead_wins(rng: random.Random, first: int, second: int) -> None:
    digests = (SCREEN.digest, OTHER.digest)
    held = {name: frozenset(rng.sample(digests, rng.randint(0, 2))) for name in ("p0", "p1")}
    request = ask(held, {name: 16 * rng.randint(0, 249) for name in ("p0", "p1")})
    work = {name: 25e-6 * request.to_compute(prefill(name)) for name in ("p0", "p1")}
    seconds = (work["p0"] + 25e-6 / 2 * first, work["p1"] + 25e-6 / 2 * second)
    if abs(seconds[0] - seconds[1]) > 0.02 * max(seconds) + 0.01:  # less is a tie, or half of a step
        best = f"p{seconds.index(min(seconds))}"
        assert {placement.prefill for placement in placements(request, first, second)} == {best}


# ------------------------------------------------------------ reports


def change(added: set[int], removed: set[int], held: set[int]) -> pb.CacheChange:
    def packed(keys: set[int]) -> bytes:
        return b"".join(key.to_bytes(8, "little") for key in keys)

    return pb.CacheChange(added=packed(added), removed=packed(removed), digest=reduce(xor, held, 0))


@given(st.lists(st.sets(st.integers(1, 30)), max_size=8))
def test_index_follows_reports(states: list[set[int]]) -> None:
    held = HeldImages()
    before = set[int]()
    images = tuple(ImageSpan(4 * key, 2, 2, key.to_bytes(8, "little") + bytes(24)) for key in range(1, 31))
    for now in states:
        assert held.change(change(now - before, before - now, now))
        assert held.among(images) == {image.digest for image in images if image.start // 4 in now}
        before = now


def test_report_that_differs_from_the_index_is_noticed() -> None:
    held = HeldImages()
    assert held.change(pb.CacheChange()), "a node of an earlier release reports no images"
    assert not held.change(change({3}, set(), {3, 5}))


def test_wrong_reports_are_refused() -> None:
    with pytest.raises(PeerError, match="a part of an image's digest"):
        HeldImages().change(pb.CacheChange(added=bytes(9)))
    many = set(range(1, MAX_REPORTED_IMAGES + 2))
    with pytest.raises(PeerError, match=r"it reports 16385 images with embeddings, the limit is 16384"):
        HeldImages().change(change(many, set(), many))
