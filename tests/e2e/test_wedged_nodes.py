"""One of two nodes computes no more: its requests go on at the other node with the same answers, new ones avoid it.

Its step does not end (simulated nodes), or its engine process or another rank is stopped (nodes with a tiny model):

    python -m pytest -m slow tests/e2e/test_wedged_nodes.py      the second half, in two minutes
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body
from fleet import Fleet, NodeProcess, add_tokenizer, start_fleet
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL

PEER_TIMEOUT = patience(3.0)
GO_ON = PEER_TIMEOUT + 5.0  # seconds until every request must run again
NOISE = 25.0  # seconds; a request that stays waits for as long as the node is wedged
LOAD = 4.0  # seconds in which clients send requests
THINK = 0.1  # seconds between the requests of a client, in which other tests use the cores
TIMING = ("--peer-timeout", f"{PEER_TIMEOUT:g}")
SIMULATED = ("--engine", "simulated", *TIMING)
HAND_OFF_ALL = ("--handoff-min-tokens", "1")
ROUTER = ("--policy", "round-robin")  # by load, a wedged node would seldom be chosen anyway


@dataclass
class Wedged:
    """A node, how to wedge and free it, and whether it knows that it is wedged."""

    role: str
    node: NodeProcess
    wedge: Callable[[], None]
    free: Callable[[], None]
    is_known: Callable[[], bool]


def total(fleet: Fleet, counter: str) -> float:
    return sum(node.counter(counter) for node in fleet.decode)


def check_requests_leave(fleet: Fleet, wedged: Wedged, load: Load) -> None:
    failed = total(fleet, "handoff_failures")
    with ThreadPoolExecutor(1) as pool:
        if wedged.role == "prefill":  # D does not know yet, and sends it prompts
            wedged.wedge()
        running = pool.submit(lambda: asyncio.run(load.run(fleet.url, clients=16, seconds=LOAD, seed=5)))
        if wedged.role == "decode":
            fleet.wait_until(lambda: wedged.node.status().running > 0, 20.0)
            wedged.wedge()
        began = time.monotonic()
        running.result()
    assert time.monotonic() - began < patience(LOAD + GO_ON + NOISE)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > 16
    assert wedged.is_known()
    assert wedged.role == "decode" or total(fleet, "handoff_failures") > failed, "it had handoffs in flight"


def check_new_requests_avoid(fleet: Fleet, wedged: Wedged, load: Load) -> None:
    """A request that reached the node would fail there and count."""

    def attempts() -> float:
        decodes = wedged.role == "decode"
        return wedged.node.counter("decode_requests") if decodes else total(fleet, "handoff_failures")

    asyncio.run(load.run(fleet.url, clients=4, seconds=1.0, seed=6))
    before = attempts()
    handoffs = total(fleet, "handoffs")
    answers = load.outcomes["exact"]
    asyncio.run(load.run(fleet.url, clients=4, seconds=1.0, seed=7))
    assert wedged.is_known()
    assert load.outcomes["exact"] > answers
    assert attempts() == before
    assert total(fleet, "handoffs") > handoffs, "the other prefill node computes the prompts"


def check_used_again(fleet: Fleet, wedged: Wedged, load: Load) -> None:
    """Prompts and requests from before do not count: they have left."""
    fleet.wait_until(lambda: not wedged.is_known(), 20.0)
    wedged.node.wait_idle(30.0)
    name = "decode_requests" if wedged.role == "decode" else "leases_granted"
    before = wedged.node.counter(name)
    end = time.monotonic() + patience(30.0)
    while wedged.node.counter(name) == before:
        assert time.monotonic() < end, "a node that has recovered is not used"
        asyncio.run(load.run(fleet.url, clients=4, seconds=0.5, seed=8))


def check_wedged_node(fleet: Fleet, wedged: Wedged) -> None:
    rng = random.Random(3)
    load = Load([new_body(rng, max_prompt=300, max_tokens=100) for _ in range(16)], think=THINK)
    asyncio.run(load.record_expected(fleet.url, rng))
    try:
        check_requests_leave(fleet, wedged, load)
        check_new_requests_avoid(fleet, wedged, load)
    finally:
        wedged.free()
    check_used_again(fleet, wedged, load)
    assert not load.failures, load.failures[0]
    for node in (*fleet.prefill, *fleet.decode):
        node.wait_idle(30.0)


# ---------------------------------------------------------------- a step does not end


class EndlessFleet(NamedTuple):
    """Two simulated nodes per role; steps of the first one of a role do not end while its trigger exists."""

    fleet: Fleet
    triggers: dict[str, Path]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndlessFleet]:
    hook = Path(__file__).parent / "endless_step"
    triggers = {role: tmp_path_factory.mktemp(role) / "endless" for role in ("decode", "prefill")}

    def variables(role: str) -> dict[str, str]:
        path = f"{hook}:{os.environ.get('PYTHONPATH', '')}"
        return {"PYTHONPATH": path, "ENDLESS_TRIGGER": str(triggers[role])}

    with Fleet() as fleet:
        fleet.start_prefill(EMBEDDED_MODEL, SIMULATED, variables("prefill"))
        fleet.start_prefill(EMBEDDED_MODEL, SIMULATED)
        fleet.start_decode(EMBEDDED_MODEL, (*SIMULATED, *HAND_OFF_ALL), variables("decode"))
        fleet.start_decode(EMBEDDED_MODEL, (*SIMULATED, *HAND_OFF_ALL))
        fleet.start_router(EMBEDDED_MODEL, ROUTER)
        fleet.wait_ready()
        yield EndlessFleet(fleet, triggers)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_requests_leave_a_node_whose_step_does_not_end(endless: EndlessFleet, role: str) -> None:
    fleet = endless.fleet
    trigger = endless.triggers[role]
    node = (fleet.decode if role == "decode" else fleet.prefill)[0]

    def is_known() -> bool:
        description = node.describe()
        return description.stalled or description.state == "stuck"

    check_wedged_node(fleet, Wedged(role, node, trigger.touch, trigger.unlink, is_known))


@pytest.mark.slow
@pytest.mark.parametrize("where", [".between", ""])
def test_a_node_whose_engine_hangs_says_so_without_requests(endless: EndlessFleet, where: str) -> None:
    fleet = endless.fleet
    node = endless.fleet.decode[0]
    trigger = endless.triggers["decode"].with_name(f"endless{where}")
    trigger.touch()
    try:
        fleet.wait_until(lambda: node.describe().state == "stuck", 30.0)
    finally:
        trigger.unlink()
    fleet.wait_until(lambda: node.describe().state == "ready", 30.0)


# ---------------------------------------------------------------- an engine or rank is stopped


@pytest.fixture(scope="module")
def real_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY)
    flags = ("--pp", "2", *TIMING), ("--tp", "2", *TIMING, *HAND_OFF_ALL)
    with start_fleet(add_tokenizer(model), 2, 2, True, *flags, ROUTER) as fleet:
        yield fleet


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", ["engine", "rank 1"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_requests_leave_a_node_whose_engine_or_rank_is_stopped(real_fleet: Fleet, role: str, part: str) -> None:
    node = (real_fleet.decode if role == "decode" else real_fleet.prefill)[0]
    wedged = Wedged(
        role,
        node,
        wedge=lambda: node.stop(part),
        free=lambda: node.resume(part),
        is_known=lambda: node.describe().state == "stuck",
    )
    check_wedged_node(real_fleet, wedged)
