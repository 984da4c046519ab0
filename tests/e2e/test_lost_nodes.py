"""Decode nodes die or hang during answers, and the answers equal an undisturbed fleet's, token for token.

Requests have one or three choices or two prompts, penalties, seeds, log-probabilities, grammars and stop strings; they
are streamed or not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body
from fault_injection import FaultInjector, random_faults
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess, add_tokenizer, start_fleet

SMALL = ("--max-num-seqs", "8", "--max-model-len", "256", "--kv-cache-memory", "2MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY))


def new_load(seed: int, count: int, max_prompt: int, max_tokens: int) -> tuple[Load, random.Random]:
    rng = random.Random(seed)
    return Load([new_body(rng, max_prompt, max_tokens) for _ in range(count)]), rng


def migrations(fleet: Fleet) -> float:
    lines = httpx.get(f"{fleet.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pdserve_migrations_total"))


def check_fault(fleet: Fleet, load: Load, rng: random.Random, inject: Callable[[NodeProcess], None]) -> None:
    """Inject a fault into one of two busy decode nodes; all answers must be exact, and the other node idle after."""
    first, second = fleet.decode
    asyncio.run(load.record_expected(fleet.url, rng))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(load.run(fleet.url, clients=6, seconds=2.0, seed=0)))
        fleet.wait_until(lambda: first.status().running > 0, 20.0)
        inject(first)
        fleet.wait_until(lambda: migrations(fleet) > 0, 20.0)
        running.result()
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"]
    for node in (*fleet.prefill, second):
        node.wait_idle(30.0)


@pytest.mark.slow  # test_agent_turns.py has a quick test of real models
def test_requests_migrate_when_a_decode_node_dies(model: Path) -> None:
    """P keeps the blocks of a dead reader until the lease expires, and then frees them."""
    flags = ("--lease-seconds", "3")
    with start_fleet(model, 1, 2, True, flags, ("--handoff-min-tokens", "1")) as fleet:
        check_fault(fleet, *new_load(seed=1, count=12, max_prompt=200, max_tokens=100), NodeProcess.kill)


@pytest.mark.slow
def test_answers_stay_exact_while_nodes_die_and_hang_at_random(model: Path) -> None:
    """A short version of bench/chaos.py."""
    simulated = ("--engine", "simulated")
    load, rng = new_load(seed=2, count=20, max_prompt=300, max_tokens=100)
    with start_fleet(model, 2, 3, True, simulated, simulated, ("--migrations", "20")) as fleet:
        asyncio.run(load.record_expected(fleet.url, rng))
        with FaultInjector(fleet, random_faults(7, {"prefill": 2, "decode": 3}, pause=0.7)):
            asyncio.run(load.run(fleet.url, clients=8, seconds=4.0, seed=4))
        assert not load.failures, load.failures[0]
        assert load.outcomes["exact"]
        assert migrations(fleet) > 0
        for node in (*fleet.prefill, *fleet.decode):
            node.wait_idle(60.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["node", "frontend", "engine"])
def test_requests_migrate_when_a_decode_node_hangs(model: Path, part: str) -> None:
    with start_fleet(model, 1, 2, True, (), ("--handoff-min-tokens", "1")) as fleet:
        load, rng = new_load(seed=5, count=12, max_prompt=200, max_tokens=100)
        check_fault(fleet, load, rng, lambda node: node.stop(part))
        fleet.decode[0].resume(part)
        fleet.decode[0].wait_idle(30.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runners", [("V2", "V2"), ("V2", "V1"), ("V1", "V2")])
def test_migration_between_v1_and_v2_keeps_tokens(model: Path, runners: Sequence[str]) -> None:
    with Fleet() as fleet:
        fleet.start_prefill(model, SMALL)
        for name in runners:
            fleet.start_decode(model, (*SMALL, "--handoff-min-tokens", "1"), RUNNER_ENVIRONMENTS[name])
        fleet.start_router(model)
        fleet.wait_ready()
        check_fault(fleet, *new_load(seed=6, count=6, max_prompt=20, max_tokens=12), NodeProcess.kill)
