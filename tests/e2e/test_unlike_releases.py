"""Nodes and routers of this release and of one before serve together: each pairing answers 1,000 requests exactly.

The release before is a commit of this repository, the first one with version 5 of the protocol. Its nodes run from an
archive with another version of pdserve. Its routers pair nodes of equal versions only, so beside them it has this one.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from answers import Answer, first_difference, send_completion
from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body
from fleet import MODEL_NAME, NO_VARIABLES, Fleet, add_tokenizer
from machine import patience
from rolling import FleetHandle, all_nodes_ready, balanced_client, rolling_restart

import pdserve

COMMIT = "c4bc7ac264b9ea92233c15dff77d0ec40c00024d"
REPOSITORY = Path(pdserve.__file__).parents[1]
OTHER_VERSION = "0.0.9"

REQUESTS = 1000
CLIENTS = 32
SIMULATED = ("--engine", "simulated")
DECODE = ("--handoff-min-tokens", "0")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Release(NamedTuple):
    """Variables that start the programs of one release."""

    version: str
    environ: Mapping[str, str]


THIS = Release(pdserve.__version__, NO_VARIABLES)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    git = ["git", "-C", str(REPOSITORY), "archive", COMMIT]
    found = subprocess.run(git, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(
            f"no commit {COMMIT[:8]} here, which needs a clone with its history: {found.stderr.decode().strip()}"
        )
    return found.stdout


@pytest.fixture(scope="module")
def before(archive: bytes, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The release before, as its own version."""
    return unpack(archive, tmp_path_factory.mktemp("before"), OTHER_VERSION)


@pytest.fixture(scope="module")
def before_as_this(archive: bytes, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The release before, which calls itself as this one does."""
    return unpack(archive, tmp_path_factory.mktemp("before-as-this"), pdserve.__version__)


def unpack(archive: bytes, directory: Path, version: str) -> Release:
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive, check=True)
    module = directory / "pdserve" / "__init__.py"
    text = module.read_text()
    module.write_text(text.replace('__version__ = "0.1.0"', f'__version__ = "{version}"'))
    assert f'"{version}"' in module.read_text()
    return Release(version, {"PYTHONPATH": str(directory), "PYTHONSAFEPATH": "1"})  # not the working directory's code


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY))


def new_requests(count: int) -> list[dict[str, Any]]:
    """Return different requests: greedy and sampled, one and two choices, streamed or not."""
    rng = random.Random(7)
    return [
        {
            "model": MODEL_NAME,
            "prompt": rng.choices(range(3, VOCABULARY), k=rng.randint(20, 120)),
            "max_tokens": rng.randint(4, 12),
            "temperature": rng.choice([0.0, 0.9]),
            "seed": rng.getrandbits(60),
            "n": rng.choice([1, 1, 1, 2]),
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for _ in range(count)
    ]


def answers_of(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Send all requests, ``CLIENTS`` at a time."""

    async def send_all() -> list[Answer]:
        turns = asyncio.Semaphore(CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=patience(120.0), trust_env=False) as client:

            async def send(body: dict[str, Any]) -> Answer:
                async with turns:
                    return await send_completion(client, body)

            return list(await asyncio.gather(*map(send, bodies)))

    return asyncio.run(send_all())


def expected_answers(model: Path, flags: tuple[str, ...], bodies: list[dict[str, Any]]) -> list[Answer]:
    """Return the answers of one node of this release."""
    with Fleet() as fleet:
        fleet.start_decode(model, flags)
        fleet.start_router(model)
        fleet.wait_ready()
        return answers_of(fleet.url, bodies)


@pytest.fixture(scope="module")
def simulated_answers(model: Path) -> list[Answer]:
    return expected_answers(model, SIMULATED, new_requests(REQUESTS))


@pytest.fixture(scope="module")
def real_answers(model: Path) -> list[Answer]:
    return expected_answers(model, (), new_requests(REQUESTS))


def check_pairing(
    model: Path, flags: tuple[str, ...], expected: list[Answer], prefill: Release, decode: Release, router: Release
) -> None:
    """All requests are handed off from a node of one release to one of the other, and answered exactly."""
    bodies = new_requests(len(expected))
    with Fleet() as fleet:
        p = fleet.start_prefill(model, flags, prefill.environ)
        d = fleet.start_decode(model, (*flags, *DECODE), decode.environ)
        fleet.start_router(model, (), router.environ)
        fleet.wait_ready()
        fleet.wait_until(lambda: list(d.describe().connected_peers) == [p.describe().node_id], 20.0)
        fleet.wait_until(lambda: all_nodes_ready([fleet.url], 1, 1), 20.0)
        assert (p.describe().version, d.describe().version) == (prefill.version, decode.version)
        found = answers_of(fleet.url, bodies)
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine.matches(theirs), f"request {number}: {first_difference(mine, theirs)}"
        assert d.counter("handoff_failures") == 0
        assert d.counter("handoffs") == len(expected)
        for node in fleet.nodes:
            node.wait_idle()


class Upgrade(FleetHandle):
    """A process of the release before, which starts again as one of this release."""

    def start(self) -> None:
        self.process.environ = THIS.environ
        super().start()


@pytest.mark.parametrize("flags", [SIMULATED, ()], ids=["simulated", "real"])
def test_a_fleet_changes_its_release_under_load(model: Path, before: Release, flags: tuple[str, ...]) -> None:
    """Routers first, then prefill and decode nodes, one by one. No request fails, and no answer changes."""
    rng = random.Random(3)
    load = Load([new_body(rng, max_prompt=200, max_tokens=60) for _ in range(12)])
    with Fleet() as fleet, ThreadPoolExecutor(1) as pool:
        prefill = [fleet.start_prefill(model, flags, before.environ) for _ in range(2)]
        decode = [fleet.start_decode(model, (*flags, *DECODE), before.environ) for _ in range(2)]
        routers = [fleet.start_router(model, ("--migrations", "0", "--drain-grace", "1"), before.environ) for _ in "12"]
        fleet.wait_ready()
        fleet.wait_until(lambda: all(router.address for router in routers), 20.0)
        urls = [f"http://{router.address}" for router in routers]

        def settled() -> bool:
            return all_nodes_ready(urls, 2, 2) and all(len(node.describe().connected_peers) == 2 for node in decode)

        async def run_clients() -> None:
            async with balanced_client(urls, 12) as client:
                await load.run_until(upgrading.done, client, 6, seed=0)

        fleet.wait_until(settled, 20.0)
        asyncio.run(load.record_expected(urls[0], rng))
        handles = [Upgrade(process) for process in (*routers, *prefill, *decode)]
        upgrading = pool.submit(rolling_restart, handles, settled)
        asyncio.run(run_clients())
        upgrading.result()
        assert {node.describe().version for node in fleet.nodes} == {THIS.version}
        for node in fleet.nodes:
            node.wait_idle(30.0)
    assert not load.failures, load.failures[0]
    assert load.outcomes["exact"] > len(load.bodies)


def test_earlier_prefill_node(model: Path, before: Release, simulated_answers: list[Answer]) -> None:
    check_pairing(model, SIMULATED, simulated_answers, before, THIS, THIS)


def test_earlier_decode_node(model: Path, before: Release, simulated_answers: list[Answer]) -> None:
    check_pairing(model, SIMULATED, simulated_answers, THIS, before, THIS)


def test_earlier_prefill_node_and_router(model: Path, before_as_this: Release, simulated_answers: list[Answer]) -> None:
    check_pairing(model, SIMULATED, simulated_answers, before_as_this, THIS, before_as_this)


def test_earlier_decode_node_and_router(model: Path, before_as_this: Release, simulated_answers: list[Answer]) -> None:
    check_pairing(model, SIMULATED, simulated_answers, THIS, before_as_this, before_as_this)


def test_real_kv_of_an_earlier_prefill_node(model: Path, before: Release, real_answers: list[Answer]) -> None:
    check_pairing(model, (), real_answers, before, THIS, THIS)


def test_real_kv_for_an_earlier_decode_node(model: Path, before: Release, real_answers: list[Answer]) -> None:
    check_pairing(model, (), real_answers, THIS, before, THIS)
