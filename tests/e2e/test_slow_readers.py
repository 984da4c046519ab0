"""Clients that do not read: nodes stop computing for them, others are served, and they lose no token when they read."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from answers import Answer, send_completion, sse_lines
from checkpoints import make_checkpoint
from client_load import VOCABULARY
from fleet import MODEL_NAME, Fleet, NodeProcess, add_tokenizer, start_fleet
from machine import patience
from slow_clients import UNREAD, send_unread

CLIENTS = 6
LONG: dict[str, Any] = {"n": 4, "max_tokens": 500, "logprobs": 20, "temperature": 0.9, "seed": 7, "ignore_eos": True}
BODIES = {
    "seeds, penalties": {**LONG, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    "grammar": {**LONG, "structured_outputs": {"regex": "[a-z ]{3000,}"}},
    "two prompts": {**LONG, "n": 2, "prompt": [[5] * 100, [6] * 40]},
}
EVERYDAY = "seeds, penalties"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Fleet]:
    with start_fleet(model, decode=2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def simulated(model: Path) -> Iterator[Fleet]:
    with start_fleet(model, 0, 1, decode_flags=("--engine", "simulated")) as fleet:
        yield fleet


def total(fleet: Fleet, read: Callable[[NodeProcess], float]) -> float:
    return sum(map(read, fleet.decode))


def paused(fleet: Fleet) -> float:
    """Return the sequences of paused requests if nothing else runs, else 0."""
    if total(fleet, lambda node: node.status().running + node.status().waiting + node.status().reading):
        return 0
    return total(fleet, lambda node: node.status().paused)


@pytest.mark.slow
def test_nodes_compute_little_for_clients_that_do_not_read(fleet: Fleet) -> None:
    before = total(fleet, lambda node: node.counter("sampled_tokens"))
    with ExitStack() as stack:
        for _ in range(CLIENTS):
            stack.enter_context(send_unread(fleet.url, UNREAD))
        fleet.wait_until(lambda: paused(fleet) == CLIENTS * UNREAD["n"], 60.0)
        sampled = total(fleet, lambda node: node.counter("sampled_tokens")) - before
        assert sampled < CLIENTS * UNREAD["n"] * UNREAD["max_tokens"] / 10
        assert len(fleet.complete(list(range(100, 180)), 50)) == 50
        assert paused(fleet) == CLIENTS * UNREAD["n"], "they are paused until they read"
    for node in fleet.decode:
        node.wait_idle(20.0)


def request_body(kind: str) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": [5] * 100, "stream": True, **BODIES[kind]}


async def read_after(wait: Callable[[], None], url: str, body: dict[str, Any]) -> Answer:
    """Send a streaming request and begin to read its answer after ``wait``."""
    answer = Answer()
    body = {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with (
        httpx.AsyncClient(base_url=url, timeout=patience(60.0), trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await asyncio.to_thread(wait)
        async for line in sse_lines(response):
            if line.startswith("data: {"):
                answer.add(json.loads(line.removeprefix("data: ")))
    return answer


async def unhindered(url: str, body: dict[str, Any]) -> Answer:
    """Return the answer to a request whose client reads all of it as one body, which nodes do not pause."""
    async with httpx.AsyncClient(base_url=url, timeout=patience(60.0), trust_env=False) as client:
        return await send_completion(client, {**body, "stream": False})


@pytest.fixture(scope="module")
def unhindered_answer(fleet: Fleet) -> Callable[[str], Answer]:
    return functools.cache(lambda kind: asyncio.run(unhindered(fleet.url, request_body(kind))))


@pytest.mark.slow  # the next test has a quick one
@pytest.mark.parametrize("kind", BODIES)
def test_client_that_reads_late_gets_the_same_answer(
    fleet: Fleet, kind: str, unhindered_answer: Callable[[str], Answer]
) -> None:
    body = request_body(kind)
    expected = unhindered_answer(kind)
    answer = asyncio.run(read_after(lambda: fleet.wait_until(lambda: paused(fleet) > 0, 30.0), fleet.url, body))
    assert answer.num_tokens == expected.num_tokens > 1000
    assert answer.matches(expected)


@pytest.mark.slow
def test_paused_request_migrates(fleet: Fleet, unhindered_answer: Callable[[str], Answer]) -> None:
    """The node dies while the request is paused. The request is paused on the other node, too, and continues there."""
    body = request_body(EVERYDAY)
    expected = unhindered_answer(EVERYDAY)

    def move() -> None:
        fleet.wait_until(lambda: paused(fleet) > 0, 30.0)
        first = next(node for node in fleet.decode if node.status().paused)
        (second,) = (node for node in fleet.decode if node is not first)
        sampled = second.counter("sampled_tokens")
        first.kill()
        fleet.wait_until(lambda: second.status().paused > 0, 30.0)
        assert second.counter("sampled_tokens") == sampled, "nothing was computed for it"
        first.restart()

    assert asyncio.run(read_after(move, fleet.url, body)).matches(expected)


@contextmanager
def another_router(fleet: Fleet, model: Path, *flags: str) -> Iterator[None]:
    """Use a router of its own for the same nodes."""
    usual = fleet.router
    try:
        fleet.start_router(model, flags)
        fleet.wait_ready()
        fleet.wait_until(fleet.serves, 20.0)
        yield
    finally:
        fleet.router = usual


def router_metric(fleet: Fleet, name: str) -> float:
    text = httpx.get(f"{fleet.url}/metrics", trust_env=False, timeout=patience(20)).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.mark.slow
@pytest.mark.parametrize("served", ["simulated", "fleet"])
def test_deadline_passes_while_a_request_is_paused(served: str, request: pytest.FixtureRequest, model: Path) -> None:
    """The request's blocks are freed before the client reads. The client then gets the output so far and the error."""
    fleet: Fleet = request.getfixturevalue(served)
    with another_router(fleet, model, "--request-timeout", "6"), send_unread(fleet.url, UNREAD) as client:
        fleet.wait_until(lambda: paused(fleet) == UNREAD["n"], 60.0)
        for node in fleet.decode:
            node.wait_idle(30.0)
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(1 << 16)
            assert data, received[-300:]
            received += data
        last = received.rpartition(b"data: ")[2]
        assert b"timeout_error" in last
        assert b"[DONE]" not in received
        fleet.wait_until(lambda: router_metric(fleet, "pdserve_requests_in_flight") == 0, 20.0)


@pytest.mark.slow  # test_hostile.py has a quick test
@pytest.mark.parametrize("stream", [pytest.param(True, id="stream"), pytest.param(False, id="body")])
def test_stalled_client_with_many_choices_is_disconnected(fleet: Fleet, model: Path, stream: bool) -> None:
    with another_router(fleet, model, "--client-stall-timeout", "1"):
        assert len(fleet.complete([9] * 40, 500)) == 500, "waiting for a response is not stalling"
        with send_unread(fleet.url, {**UNREAD, "stream": stream, "max_tokens": 2000 if stream else 200}) as client:
            fleet.wait_until(lambda: router_metric(fleet, "pdserve_stalled_clients_total") == 1, 60.0)
            for node in fleet.decode:
                node.wait_idle(20.0)
            assert router_metric(fleet, "pdserve_requests_in_flight") == 0
            with suppress(ConnectionResetError):
                while client.recv(1 << 16):
                    pass
