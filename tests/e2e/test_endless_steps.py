"""A step of one of two nodes does not end: its requests go on at the other node, with the same answers."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client_load import Load, new_body
from fleet import Fleet, NodeProcess

from pdserve.config.hub import EMBEDDED_MODEL

PEER_TIMEOUT = 3.0
GO_ON = PEER_TIMEOUT + 5.0  # seconds until every request must run again
NOISE = 25.0  # seconds; without the detection of stalls a step is endless after 120 s
LOAD = 4.0  # seconds in which clients send requests
NODE = ("--engine", "simulated", "--peer-timeout", str(PEER_TIMEOUT))


@pytest.fixture
def trigger(tmp_path: Path) -> Path:
    return tmp_path / "endless"


@pytest.fixture
def fleet(trigger: Path) -> Iterator[Fleet]:
    """Two nodes of each role; the steps of the first ones can become endless."""
    hook = Path(__file__).parent / "endless_step"
    environ = {"PYTHONPATH": f"{hook}:{os.environ.get('PYTHONPATH', '')}"}
    with Fleet() as fleet:
        for index in range(2):
            variables = environ | {"ENDLESS_TRIGGER": f"{trigger}.prefill"} if index == 0 else {}
            fleet.start_prefill(EMBEDDED_MODEL, NODE, variables)
        for index in range(2):
            variables = environ | {"ENDLESS_TRIGGER": f"{trigger}.decode"} if index == 0 else {}
            fleet.start_decode(EMBEDDED_MODEL, (*NODE, "--handoff-min-tokens", "1"), variables)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready()
        yield fleet


def num_requests(node: NodeProcess, role: str) -> float:
    return node.counter("decode_requests") if role == "decode" else node.status().steps


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_requests_leave_a_node_whose_step_does_not_end(fleet: Fleet, trigger: Path, role: str) -> None:
    node = (fleet.decode if role == "decode" else fleet.prefill)[0]
    trigger = trigger.with_name(f"{trigger.name}.{role}")
    rng = random.Random(3)
    load = Load([new_body(rng, 300, 100) for _ in range(16)])
    asyncio.run(load.record_expected(fleet.url, rng))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(load.run(fleet.url, clients=24, seconds=LOAD, seed=5)))
        fleet.wait_until(lambda: node.status().running > 0, 20.0)
        trigger.touch()
        began = time.monotonic()
        running.result()
        assert time.monotonic() - began < LOAD + GO_ON + NOISE
        assert not load.failures, load.failures[0]
        assert load.outcomes["exact"] > 24

        fleet.wait_until(lambda: node.describe().stalled, 20.0)
        assert node.describe().state == "ready", "a slow step is no reason to restart a node"
        before = len(load.failures), num_requests(node, role)
        asyncio.run(load.run(fleet.url, clients=4, seconds=1.0, seed=6))
        assert (len(load.failures), num_requests(node, role)) == before, "new requests use the other node"

        trigger.unlink()
        fleet.wait_until(lambda: not node.describe().stalled, 20.0)
        before_used = num_requests(node, role)
        end = time.monotonic() + 30.0
        while num_requests(node, role) == before_used and time.monotonic() < end:
            asyncio.run(load.run(fleet.url, clients=4, seconds=0.5, seed=7))
        assert num_requests(node, role) > before_used, "a node that has recovered is used again"
        assert not load.failures, load.failures[0]
    for each in (*fleet.prefill, *fleet.decode):
        each.wait_idle(30.0)
