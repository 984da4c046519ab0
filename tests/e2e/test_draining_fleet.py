"""Nodes drain under load after SIGTERM: every client gets its exact answer, and no failure is counted."""

from __future__ import annotations

import asyncio
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body
from fleet import Fleet, NodeProcess, add_tokenizer, start_fleet

SIMULATED = ("--engine", "simulated")
NO_MIGRATIONS = ("--migrations", "0")  # migrations because of a drain do not count towards this limit
END_SECONDS = 40.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY))


def migrations(fleet: Fleet, reason: str) -> float:
    lines = httpx.get(f"{fleet.url}/metrics", trust_env=False).text.splitlines()
    series = [line for line in lines if line.startswith(f'pdserve_migrations_total{{reason="{reason}"}}')]
    return sum(float(line.rpartition(" ")[2]) for line in series)


def drain_under_load(fleet: Fleet, node: NodeProcess, max_tokens: int = 100) -> None:
    """Drain a node while clients send requests of all kinds: n, penalties, grammars, log-probabilities."""
    rng = random.Random(3)
    load = Load([new_body(rng, max_prompt=300, max_tokens=max_tokens) for _ in range(12)])
    asyncio.run(load.record_expected(fleet.url, rng))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(load.run(fleet.url, clients=6, seconds=2.0, seed=0)))
        fleet.wait_until(lambda: node.status().running > 0, 20.0)
        node.signal(signal.SIGTERM)
        node.wait_ended(END_SECONDS)
        running.result()
    assert node.child.process.returncode == 0, node.output
    assert not any(word in node.output for word in ("Traceback", "ERROR")), node.output
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"]
    for other in (*fleet.prefill, *fleet.decode):
        if other is not node:
            other.wait_idle(30.0)


@pytest.mark.slow
def test_draining_decode_node_finishes_its_requests(model: Path) -> None:
    with start_fleet(model, 1, 2, True, SIMULATED, SIMULATED, NO_MIGRATIONS) as fleet:
        drain_under_load(fleet, fleet.decode[0])
        assert migrations(fleet, "lost") == migrations(fleet, "failed") == 0


def test_draining_decode_node_migrates_its_requests(model: Path) -> None:
    decode = (*SIMULATED, "--drain-timeout", "0")
    with start_fleet(model, 1, 2, True, SIMULATED, decode, NO_MIGRATIONS) as fleet:
        drain_under_load(fleet, fleet.decode[0])
        assert migrations(fleet, "drained") > 0
        assert migrations(fleet, "lost") == migrations(fleet, "failed") == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("timeout", [0, 30])
def test_draining_prefill_node_loses_no_request(model: Path, timeout: float, policy: str) -> None:
    prefill = (*SIMULATED, "--sim-costs", "prompt-token=0.0005", "--drain-timeout", str(timeout))
    decode = (*SIMULATED, "--handoff-min-tokens", "1", "--kv-failure-policy", policy)
    with start_fleet(model, 2, 2, True, prefill, decode, NO_MIGRATIONS) as fleet:
        drain_under_load(fleet, fleet.prefill[0], max_tokens=20)
        assert all(node.counter("decode_request_failures") == 0 for node in fleet.decode)
        assert all(node.counter("peer_losses") == 0 for node in fleet.decode)
