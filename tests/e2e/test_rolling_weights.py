"""A fleet whose weights are rolled under load: each answer is that of the version which it names, and none fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body
from fault_injection import FaultInjector, random_faults
from fleet import Fleet, NodeProcess, add_tokenizer
from machine import patience
from rolling import all_nodes_ready

from cli.main import main

SIMULATED = ("--engine", "simulated", "--sim-costs", "step=0.004")
CLIENTS = 6
NO_NODE = "took the request", "no decode node"  # with these weights: what killed nodes have begun


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the checkpoints a and b of the same model."""
    folder = tmp_path_factory.mktemp("versions")
    for seed, name in enumerate("ab"):
        add_tokenizer(make_checkpoint(folder / name, "qwen3", vocab_size=VOCABULARY, seed=seed))
    return folder


def reload(nodes: Sequence[NodeProcess], name: str, when: str = "wait") -> bool:
    """Return whether all nodes have changed their weights."""
    words = ["--model", name, "--when", when, "--pause", "0"]
    return main(["weights", "reload", *words, *(node.address for node in nodes)]) == 0


class RollingFleet:
    """2 P and 2 D behind a router."""

    def __init__(self, fleet: Fleet, versions: Path, flags: Sequence[str]) -> None:
        self._fleet = fleet
        both = [*flags, "--allow-weight-changes", str(versions), "--drain-timeout", "60"]
        self.prefill = [fleet.start_prefill(versions / "a", both) for _ in range(2)]
        self.decode = [fleet.start_decode(versions / "a", [*both, "--handoff-min-tokens", "1"]) for _ in range(2)]
        fleet.start_router(versions / "a")
        fleet.wait_ready()
        self.wait_settled()

    def wait_settled(self) -> None:
        """Wait until the router knows all nodes as ready, and each D has all P of its version as peers."""
        self._fleet.wait_until(self._settled, 60.0)

    def _settled(self) -> bool:
        prefill = {node.describe().node_id: node.describe().compat_hash for node in self.prefill}
        for node in self.decode:
            mine = node.describe()
            if set(mine.connected_peers) != {name for name, other in prefill.items() if other == mine.compat_hash}:
                return False
        return all_nodes_ready([self._fleet.url], 2, 2)

    def roll(self, name: str) -> None:
        for node in (self.prefill[0], self.decode[0], self.prefill[1], self.decode[1]):
            assert reload([node], name)
            self.wait_settled()


async def run_clients(load: Load, url: str, is_over: Callable[[], bool]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=patience(120.0), trust_env=False) as client:
        await load.run_until(is_over, client, CLIENTS, seed=0)


def roll_under_load(
    versions: Path, flags: Sequence[str], max_tokens: int, roll: Callable[[Fleet, RollingFleet], None]
) -> Load:
    """Record the answers of both versions, then ``roll`` under load."""
    rng = random.Random(1)
    load = Load([new_body(rng, max_prompt=200, max_tokens=max_tokens) for _ in range(12)])
    with closing(Fleet()) as fleet, ThreadPoolExecutor(1) as pool:
        rolling = RollingFleet(fleet, versions, flags)
        asyncio.run(load.record_expected(fleet.url, rng))
        assert reload([*rolling.prefill, *rolling.decode], "b")
        rolling.wait_settled()
        asyncio.run(load.record_version(fleet.url))
        assert len(load.versions) == 2
        done = pool.submit(roll, fleet, rolling)
        asyncio.run(run_clients(load, fleet.url, done.done))
        done.result()
        for node in (*rolling.prefill, *rolling.decode):
            node.wait_idle(30.0)
    return load


def roll_twice(fleet: Fleet, rolling: RollingFleet) -> None:
    for name in "ab":
        rolling.roll(name)
        time.sleep(1.0)


def roll_with_faults(fleet: Fleet, rolling: RollingFleet) -> None:
    """Change weights at random, also of nodes that are dead or about to be killed, which come back with version a."""
    rng = random.Random(3)
    nodes = [*rolling.prefill, *rolling.decode]
    kills = (fault for fault in random_faults(5, {"prefill": 2, "decode": 2}, pause=2.0) if "stop" not in fault.kind)
    with FaultInjector(fleet, kills) as injector:
        end = time.monotonic() + patience(60.0)
        changed = 0
        while time.monotonic() < end:
            changed += reload([rng.choice(nodes)], rng.choice("ab"), rng.choice(("wait", "abort")))
            time.sleep(rng.uniform(0.5, 2.0))
    assert changed > 5
    assert sum(injector.injected.values()) > 5
    rolling.wait_settled()


@pytest.mark.slow
def test_every_answer_is_that_of_the_weights_it_names(versions: Path) -> None:
    load = roll_under_load(versions, SIMULATED, 100, roll_twice)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > CLIENTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_answer_of_a_real_model_is_that_of_the_weights_it_names(versions: Path) -> None:
    load = roll_under_load(versions, (), 60, roll_twice)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > CLIENTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_during_changes_mix_no_weights(versions: Path) -> None:
    """An answer may fail if all nodes with its weights have died or changed, but none is wrong."""
    load = roll_under_load(versions, SIMULATED, 400, roll_with_faults)
    assert not load.outcomes["different"], load.failures
    assert all(any(text in failure for text in NO_NODE) for failure in load.failures), load.failures
    assert load.outcomes["exact"] > 10 * CLIENTS
