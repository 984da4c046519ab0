"""A rolling restart of all processes of a fleet under load fails no request and changes no answer.

Clients connect through a load balancer that polls the health of two routers. They do not retry.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body
from fleet import Fleet, add_tokenizer
from rolling import FleetHandle, all_nodes_ready, balanced_client, rolling_restart

SIMULATED = ("--engine", "simulated")
ROUTER = ("--migrations", "0", "--drain-grace", "1")  # longer than the load balancer's poll interval
CLIENTS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY))


def restart_all(model: Path, flags: Sequence[str], max_tokens: int) -> Load:
    """Restart 2 P, 2 D and 2 routers under load; return the load with its outcomes."""
    rng = random.Random(1)
    load = Load([new_body(rng, max_prompt=200, max_tokens=max_tokens) for _ in range(12)])
    with Fleet() as fleet, ThreadPoolExecutor(1) as pool:
        prefill = [fleet.start_prefill(model, flags) for _ in range(2)]
        decode = [fleet.start_decode(model, [*flags, "--handoff-min-tokens", "1"]) for _ in range(2)]
        routers = [fleet.start_router(model, ROUTER) for _ in range(2)]
        fleet.wait_ready()
        fleet.wait_until(
            lambda: all(router.address for router in routers), 20.0
        )  # wait_ready waits only for the last router
        urls = [f"http://{router.address}" for router in routers]

        def settled() -> bool:
            return all_nodes_ready(urls, 2, 2) and all(len(node.describe().connected_peers) == 2 for node in decode)

        fleet.wait_until(settled, 20.0)
        asyncio.run(load.record_expected(urls[0], rng))
        handles = [FleetHandle(process) for process in (*prefill, *decode, *routers)]
        restarting = pool.submit(rolling_restart, handles, settled)
        asyncio.run(run_clients(load, urls, restarting.done))
        restarting.result()
        for node in (*prefill, *decode):
            node.wait_idle(30.0)
    return load


async def run_clients(load: Load, urls: Sequence[str], is_over: Callable[[], bool]) -> None:
    async with balanced_client(urls, 2 * CLIENTS) as client:
        await load.run_until(is_over, client, CLIENTS, seed=0)


@pytest.mark.slow
def test_a_rolling_restart_fails_no_request(model: Path) -> None:
    load = restart_all(model, SIMULATED, max_tokens=100)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > CLIENTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rolling_restart_of_a_real_model_changes_no_token(model: Path) -> None:
    load = restart_all(model, (), max_tokens=60)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > CLIENTS
