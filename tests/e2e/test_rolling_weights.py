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
from fleet import Fleet, NodeProcess, add_tokenizer
from rolling import all_nodes_ready

from pdserve.cli import main

CLIENTS = 6


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the checkpoints a and b of the same model."""
    folder = tmp_path_factory.mktemp("versions")
    for seed, name in enumerate("ab"):
        add_tokenizer(make_checkpoint(folder / name, "qwen3", vocab_size=VOCABULARY, seed=seed))
    return folder


def reload(nodes: Sequence[NodeProcess], name: str) -> None:
    assert main(["weights", "reload", "--model", name, "--pause", "0", *(node.address for node in nodes)]) == 0


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
            reload([node], name)
            self.wait_settled()


async def run_clients(load: Load, url: str, is_over: Callable[[], bool]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        await load.run_until(is_over, client, CLIENTS, seed=0)


def roll_under_load(versions: Path, flags: Sequence[str], max_tokens: int) -> Load:
    rng = random.Random(1)
    load = Load([new_body(rng, max_prompt=200, max_tokens=max_tokens) for _ in range(12)])
    with closing(Fleet()) as fleet, ThreadPoolExecutor(1) as pool:
        rolling = RollingFleet(fleet, versions, flags)
        asyncio.run(load.record_expected(fleet.url, rng))
        reload([*rolling.prefill, *rolling.decode], "b")
        rolling.wait_settled()
        asyncio.run(load.record_version(fleet.url))
        assert len(load.versions) == 2

        def roll_twice() -> None:
            for name in "ab":
                rolling.roll(name)
                time.sleep(1.0)

        done = pool.submit(roll_twice)
        asyncio.run(run_clients(load, fleet.url, done.done))
        done.result()
        for node in (*rolling.prefill, *rolling.decode):
            node.wait_idle(30.0)
    return load


@pytest.mark.slow
def test_every_answer_is_that_of_the_weights_it_names(versions: Path) -> None:
    load = roll_under_load(versions, ("--engine", "simulated", "--sim-costs", "step=0.004"), max_tokens=100)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > CLIENTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_answer_of_a_real_model_is_that_of_the_weights_it_names(versions: Path) -> None:
    load = roll_under_load(versions, (), max_tokens=60)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > CLIENTS
