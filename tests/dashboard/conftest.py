"""Simulated nodes behind one router, one with HTML in its name; a browser for pages."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fleet import MODEL_NAME, Fleet
from machine import patience
from playwright.sync_api import Browser
from watched_fleet import HOSTILE, Streams
from web_pages import Watched, chromium

from pdserve.checkpoint.hub import EMBEDDED_MODEL

SIMULATED = ["--engine", "simulated"]


@pytest.fixture(scope="package")
def model() -> Path:
    return EMBEDDED_MODEL


@pytest.fixture(scope="package")
def fleet(model: Path) -> Iterator[Fleet]:
    with Fleet() as fleet:
        fleet.start_prefill(model, [*SIMULATED, "--node-id", "p-one"])
        fleet.start_decode(model, [*SIMULATED, "--node-id", "d-one"])
        fleet.start_decode(model, [*SIMULATED, "--node-id", HOSTILE])
        fleet.start_router(model)
        fleet.wait_ready()
        yield fleet


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield Watched(context.new_page())
    context.close()


@pytest.fixture(scope="package")
def streams(fleet: Fleet) -> Streams:
    """``streams(n)`` keeps n requests running inside a ``with`` block."""

    def run(url: str, ends: threading.Event, started: threading.Semaphore, seed: int) -> None:
        prompt = random.Random(seed).choices(range(3, 4096), k=200)
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        while not ends.is_set():
            with (
                suppress(httpx.TransportError),
                httpx.stream(
                    "POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=patience(30)
                ) as response,
            ):
                for index, _ in enumerate(response.iter_lines()):
                    if index == 4:
                        started.release()
                    if ends.is_set():
                        break

    @contextmanager
    def running(number: int) -> Iterator[None]:
        ends = threading.Event()
        started = threading.Semaphore(0)
        threads = [threading.Thread(target=run, args=(fleet.url, ends, started, seed)) for seed in range(number)]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                assert started.acquire(timeout=patience(30))
            yield
        finally:
            ends.set()
            for thread in threads:
                thread.join()

    return running
