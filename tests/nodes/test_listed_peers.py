"""Prefill nodes that are listed and unlisted, or have several addresses, while a decode node runs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet
from machine import patience
from node_client import RouterClient, greedy

from pdserve.checkpoint.hub import EMBEDDED_MODEL

SIMULATED = ("--engine", "simulated")
SLOW_PROMPTS = ("--sim-costs", "prompt-token=0.004", "--max-batch-tokens", "256")  # a second for each step
PATIENCE = 15.0  # seconds


class Listed:
    """A decode node whose prefill nodes are listed in a file."""

    def __init__(self, fleet: Fleet, path: Path) -> None:
        self.fleet = fleet
        self._path = path
        for _ in range(2):
            fleet.start_prefill(EMBEDDED_MODEL, [*SIMULATED, *SLOW_PROMPTS])
        fleet.wait_ready()
        self.first, self.second = (node.describe().node_id for node in fleet.prefill)
        self.list(0)
        self.decode = fleet.start_decode(EMBEDDED_MODEL, [*SIMULATED, "--prefill", f"file://{path}"], peers=False)
        fleet.wait_ready()

    def list(self, *numbers: int, more: str = "") -> None:
        """List these nodes and ``more``, and no others."""
        text = "\n".join([*(self.fleet.prefill[number].address for number in numbers), more])
        new = self._path.with_suffix(".new")
        new.write_text(f"# prefill nodes\n{text}\n")
        os.replace(new, self._path)

    def wait_connected(self, *node_ids: str) -> None:
        self.fleet.wait_until(lambda: sorted(self.decode.describe().connected_peers) == sorted(node_ids), PATIENCE)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listed]:
    with Fleet() as fleet:
        yield Listed(fleet, tmp_path_factory.mktemp("listed") / "prefill")


@pytest.fixture
def listed(started: Listed) -> Listed:
    """Only the first prefill node is listed."""
    started.list(0)
    started.wait_connected(started.first)
    return started


def test_listed_nodes_are_connected_and_unlisted_ones_finish_their_handoffs(listed: Listed) -> None:
    assert list(listed.decode.describe().connected_peers) == [listed.first]
    before = listed.decode.counter("handoffs")

    listed.list(0, 1)
    listed.wait_connected(listed.first, listed.second)

    prompt = random.Random(1).choices(range(3, 4096), k=1000)
    with RouterClient(listed.decode.address) as router:
        running = router.send(prompt, greedy(4), prefill_node=listed.first)
        listed.fleet.wait_until(lambda: listed.fleet.prefill[0].status().running == 1, PATIENCE)
        listed.list(1)
        listed.wait_connected(listed.second)
        assert not running.ended.is_set()
        assert running.ended.wait(patience(PATIENCE))
        assert len(running.tokens) == 4

        other = router.send(prompt[-200:], greedy(4), prefill_node=listed.second)
        assert other.ended.wait(patience(PATIENCE))
        assert len(other.tokens) == 4
    assert listed.decode.counter("handoffs") == before + 2
    assert listed.decode.counter("handoff_failures") == 0

    listed.list(0)
    listed.wait_connected(listed.first)
    for node in (listed.decode, *listed.fleet.prefill):
        node.wait_idle()


def test_a_node_with_two_addresses_is_connected_once_and_invalid_lines_change_nothing(listed: Listed) -> None:
    port = listed.fleet.prefill[0].address.rpartition(":")[2]
    listed.list(0, more=f"localhost:{port}")
    listed.list(0, 1, more=f"localhost:{port}")
    listed.wait_connected(listed.first, listed.second)

    listed.list(more="this is no address")
    listed.fleet.wait_until(lambda: "is no address" in listed.decode.output, PATIENCE)
    assert sorted(listed.decode.describe().connected_peers) == sorted([listed.first, listed.second])
