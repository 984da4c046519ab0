"""No legal body keeps the event loop of a router from other requests for long: the work of its steps is counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile_bodies import BODIES
from loop_work import LoopWork, Stalled, count_lines
from machine import patience
from router_in_process import InProcessRouter, router_in_process
from router_process import MODEL, router_process
from scripted_node import Conversation, Script, ScriptedNode
from vector_node import VectorNode

from router.text.prompt_encoder import PromptEncoder
from router.text.tokenizer import Tokenizer

POOLING = ("/v1/embeddings", "/v1/score", "/v1/rerank")
GENERATING = [path for path in BODIES if path not in POOLING]
FLAGS = ["--tool-call-parser", "qwen3_coder", "--response-store", "memory"]
CONTEXT = 200_000  # tokens
MAX_LINES = 250_000  # Python lines in one step of the event loop: 20 ms on an idle core
MAX_LAG = 0.5  # seconds on an idle machine; the router's garbage collection takes a part


class Scripts(dict[str, Script]):
    """Every request gets one token."""

    def __missing__(self, salt: str) -> Script:
        return _one_token


async def _one_token(conversation: Conversation) -> None:
    conversation.token(5, finish="stop")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[ScriptedNode, VectorNode]]:
    decode = ScriptedNode(MODEL, max_model_len=CONTEXT)
    decode.scripts = Scripts()
    pooling = VectorNode(MODEL, task="embed", size=8, node_id="p0")
    pooling.description.max_model_len = CONTEXT
    yield decode, pooling
    decode.close()
    pooling.close()


class Routers:
    """A router for texts and one for vectors, on one event loop."""

    def __init__(self, runner: asyncio.Runner, generating: InProcessRouter, pooling: InProcessRouter) -> None:
        self._runner = runner
        self._generating = generating
        self._pooling = pooling

    def post(self, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
        router = self._pooling if path in POOLING else self._generating
        return self._runner.run(router.post(path, json.dumps(fields).encode()))


@pytest.fixture(scope="module")
def routers(nodes: tuple[ScriptedNode, VectorNode], reading_dir: Path) -> Iterator[Routers]:
    decode, pooling = nodes

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[InProcessRouter, InProcessRouter]]:
        async with AsyncExitStack() as stack:
            flags = ["--decode", decode.address, *FLAGS]
            generating = await stack.enter_async_context(router_in_process(reading_dir, MODEL, flags))
            vectors = router_in_process(reading_dir, MODEL, ["--prefill", pooling.address])
            yield generating, await stack.enter_async_context(vectors)

    with asyncio.Runner() as runner:
        context = start()
        started = Routers(runner, *runner.run(context.__aenter__()))
        for path in BODIES:  # builds the objects that later requests reuse
            started.post(path, next(BODIES[path](100))[1])
        yield started
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize(
    ("size", "every"), [(2000, 9), *(pytest.param(size, 1, marks=pytest.mark.slow) for size in (2000, 60_000, 400_000))]
)
@pytest.mark.parametrize("path", BODIES)
def test_work_of_a_step_is_bounded(routers: Routers, path: str, size: int, every: int) -> None:
    """``every``: the fast set takes one of ``every`` bodies."""
    for name, fields in itertools.islice(BODIES[path](size), None, None, every):
        work = LoopWork(MAX_LINES)
        try:
            with work.counted():
                status, answer = routers.post(path, fields)
        except Stalled:
            pytest.fail(f"{name}: more than {MAX_LINES} lines in a step:\n{work.where}")
        assert status < 500 or b"wrote no summary" in answer, (name, answer)


@pytest.mark.parametrize(("number", "inline"), [(4, True), (400, False)])
def test_many_short_texts_are_decoded_off_the_loop(reading_tokenizer: Tokenizer, number: int, inline: bool) -> None:
    async def run() -> bool:
        encoder = PromptEncoder(reading_tokenizer, lambda: CONTEXT)
        other = asyncio.create_task(asyncio.sleep(0))
        assert len(await encoder.decode_all([[5, 6, 7]] * number)) == number
        ran = other.done()
        await encoder.close()
        await other
        return ran

    assert asyncio.run(run()) is not inline


def test_counted_work_is_that_of_the_longest_step() -> None:
    async def spin(times: int) -> None:
        for _ in range(times):
            pass

    async def run() -> None:
        await asyncio.gather(*(asyncio.create_task(spin(times)) for times in (10, 5000, 3000)))

    work = LoopWork(MAX_LINES)
    with work.counted():
        asyncio.run(run())
    assert 10_000 <= work.longest < 16_000  # two lines a turn
    with pytest.raises(Stalled):
        count_lines(lambda: sum(number for number in range(1000)), most=100)


@pytest.fixture(scope="module")
def client(nodes: tuple[ScriptedNode, VectorNode], reading_dir: Path) -> Iterator[httpx.Client]:
    """A client of a router in a process of its own."""
    with (
        router_process(reading_dir, ["--decode", nodes[0].address, *FLAGS]) as router,
        httpx.Client(base_url=router.url, timeout=patience(60), trust_env=False) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [60_000, 1_000_000])
@pytest.mark.parametrize("path", GENERATING)
def test_loop_of_a_router_lags_little(client: httpx.Client, path: str, size: int) -> None:
    """The router itself measures how late its timers run."""
    before = lagging(client)
    for name, fields in BODIES[path](size):
        client.post(path, json=fields)
        assert lagging(client) == before, name


def lagging(client: httpx.Client) -> float:
    """Return how often the loop has lagged by more than MAX_LAG."""
    most = patience(MAX_LAG)
    text = client.get("/metrics").text
    buckets = re.findall(r'^pdserve_router_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    counts = {float(bound): float(count) for bound, count in buckets}
    return counts[float("inf")] - max(count for bound, count in counts.items() if bound <= most)
