"""What a router carries: streamed tokens per second, short requests per second, and what it adds to the first token.

    PYTHONPATH=.:tests python bench/router_load.py --nodes 64 --streams 256 --seconds 10

A fleet of simulated decode nodes, a router and clients, each a process of its own. The clients send their next request
when the last one has ended.

    streams   completions of ``--tokens`` tokens are read to their end; tokens that arrive in the window are counted
    short     completions of one token, not streamed, over connections that stay open
    first     half as many streams run, and now and then a request is sent by way of the router, and another straight to
              a node by gRPC. The first token of each is timed; what the router adds is the difference at a percentile
    hold      half as many streams run for ``--hold`` seconds; memory of the router meanwhile

CPU is user + system time of the router's process over wall time; 1.3 is more than a core, as gRPC has threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil
from collector import Collector
from decode_client import connect
from fleet import Fleet

from pdserve.config.embedded import EMBEDDED_MODEL

CLIENT_PROCESSES = 4
WARM_UP = 2.0  # seconds before a window opens
STARTED_AT_ONCE = 8  # nodes


class Stream(asyncio.Protocol):
    """One connection that sends a request again and again; ``progress`` is told of each answer's bytes."""

    def __init__(self, request: bytes, progress: Callable[[bytes], int]) -> None:
        self._request = request
        self._progress = progress

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        for _ in range(self._progress(data)):
            self._transport.write(self._request)


class Counter:
    """Tokens and ended answers of all connections of a process."""

    def __init__(self, streamed: bool) -> None:
        self.tokens = self.answers = 0
        self._end = b"data: [DONE]" if streamed else b'"usage"'  # once in each answer
        self._token = b'"text"'

    def take(self, data: bytes) -> int:
        """Returns how many answers have ended. A mark that two packets share is missed, which is rare and costs."""
        self.tokens += data.count(self._token)
        ended = data.count(self._end)
        self.answers += ended
        return ended


def http_request(tokens: int, streamed: bool) -> bytes:
    body = {"prompt": list(range(300, 316)), "max_tokens": tokens, "stream": streamed, "ignore_eos": True}
    content = json.dumps({**body, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(content) + content


def run_clients(port: int, connections: int, tokens: int, streamed: bool, seconds: float, pipe: Connection) -> None:
    """Load, and what of it was answered in the window."""

    async def load() -> tuple[int, int]:
        counter, loop = Counter(streamed), asyncio.get_running_loop()
        request = http_request(tokens, streamed)
        for _ in range(connections):
            await loop.create_connection(lambda: Stream(request, counter.take), "127.0.0.1", port)
            await asyncio.sleep(WARM_UP / 2 / connections)  # nodes would step in time with each other
        await asyncio.sleep(WARM_UP)
        before = counter.tokens, counter.answers
        await asyncio.sleep(seconds)
        return counter.tokens - before[0], counter.answers - before[1]

    pipe.send(asyncio.run(load()))


class Load:
    """Client processes under way; ``result`` waits for them."""

    def __init__(self, port: int, connections: int, tokens: int, streamed: bool, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for index in range(CLIENT_PROCESSES):
            ours, theirs = context.Pipe(duplex=False)
            share = connections // CLIENT_PROCESSES + (index < connections % CLIENT_PROCESSES)
            context.Process(
                target=run_clients, args=(port, share, tokens, streamed, seconds, theirs), daemon=True
            ).start()
            self._pipes.append(ours)

    def result(self) -> tuple[int, int]:
        """Tokens and answers in the window."""
        tokens, answers = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return sum(tokens), sum(answers)


class Bench:
    def __init__(self, fleet: Fleet, args: argparse.Namespace) -> None:
        assert fleet.router is not None
        self._fleet = fleet
        self._args = args
        self._port = int(fleet.router.address.rpartition(":")[2])
        self._router = psutil.Process(fleet.router.pid)

    def throughput(self, name: str, connections: int, tokens: int, streamed: bool, seconds: float) -> None:
        load = Load(self._port, connections, tokens, streamed, seconds)
        time.sleep(WARM_UP * 1.5)
        before, started = self._cpu(), time.perf_counter()
        num_tokens, answers = load.result()
        cpu = (self._cpu() - before) / (time.perf_counter() - started)
        self._say(
            name,
            connections=connections,
            tokens_per_s=num_tokens / seconds if streamed else 0,
            requests_per_s=answers / seconds,
            cpu=cpu,
            us_per_token=1e6 * cpu * seconds / max(num_tokens, 1) if streamed else 0,
            us_per_request=1e6 * cpu * seconds / max(answers, 1),
            mib=self._megabytes(),
        )

    def first_tokens(self, seconds: float) -> None:
        """Probes by way of the router and straight to nodes, in turn, beside half the streams."""
        load = Load(self._port, self._args.streams // 2, self._args.tokens, True, seconds + WARM_UP)
        time.sleep(WARM_UP * 2)
        before, started = self._cpu(), time.perf_counter()
        routed, direct = asyncio.run(self._probe(seconds))
        cpu = (self._cpu() - before) / (time.perf_counter() - started)
        tokens, _ = load.result()
        for share in (50, 90, 99):
            with_router, without = percentile(routed, share), percentile(direct, share)
            self._say(f"first p{share}", ms=with_router, direct_ms=without, added_ms=with_router - without)
        self._say("first load", tokens_per_s=tokens / (seconds + WARM_UP), probes=len(routed), cpu=cpu)

    def hold(self, seconds: float) -> None:
        """Half the streams, and the router's memory at eleven points in time."""
        load = Load(self._port, self._args.streams // 2, self._args.tokens, True, seconds)
        time.sleep(WARM_UP * 1.5)
        for point in range(11):
            self._say("hold", seconds=seconds * point / 10, mib=self._megabytes())
            time.sleep(seconds / 10 if point < 10 else 0.0)
        tokens, answers = load.result()
        self._say("hold", tokens_per_s=tokens / seconds, requests_per_s=answers / seconds)

    async def _probe(self, seconds: float) -> tuple[list[float], list[float]]:
        """Milliseconds each."""
        routed: list[float] = []
        direct: list[float] = []
        end, tasks = time.perf_counter() + seconds, []
        async with connect(random.choice(self._fleet.decode).address) as client:

            async def straight() -> None:
                started = time.perf_counter()
                direct.append(1e3 * ((await client.token_times(range(300, 316), 1))[0] - started))

            while time.perf_counter() < end:
                tasks += [asyncio.create_task(self._by_router(routed)), asyncio.create_task(straight())]
                await asyncio.sleep(random.uniform(0.005, 0.015))
            await asyncio.gather(*tasks)
        return routed, direct

    async def _by_router(self, times: list[float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        started = time.perf_counter()
        writer.write(http_request(1, True))
        await reader.readuntil(b'"text"')
        times.append(1e3 * (time.perf_counter() - started))
        writer.close()

    def _cpu(self) -> float:
        times = self._router.cpu_times()
        return float(times.user + times.system)

    def _megabytes(self) -> float:
        return float(self._router.memory_info().rss) / 2**20

    def _say(self, name: str, **figures: float) -> None:
        print(json.dumps({"what": name, **{key: round(value, 2) for key, value in figures.items()}}), flush=True)


def percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100)[share - 1]


@contextmanager
def fleet_of(num_nodes: int, costs: str, router_flags: list[str]) -> Iterator[Fleet]:
    flags = ["--engine", "simulated", "--sim-costs", costs, "--peer-timeout", "40"]
    with Fleet() as fleet:
        while len(fleet.decode) < num_nodes:
            for _ in range(min(STARTED_AT_ONCE, num_nodes - len(fleet.decode))):
                fleet.start_decode(EMBEDDED_MODEL, flags)
            fleet.wait_ready(180.0)
        fleet.start_router(EMBEDDED_MODEL, router_flags)
        fleet.wait_ready(180.0)
        yield fleet


def tracing(share: str | None, collector: Collector) -> list[str]:
    return [] if share is None else ["--traces", collector.url, "--trace-sample", share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of each stream")
    parser.add_argument("--connections", type=int, default=64, help="of short requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window; 0: only hold")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds of the last part; 0: leave it out")
    parser.add_argument("--costs", default="step=0.0065,decode=0.0001", help="of the nodes, as --sim-costs takes them")
    parser.add_argument(
        "--trace-sample", metavar="SHARE", help="of requests that the router traces (default: no traces)"
    )
    args = parser.parse_args()
    with Collector() as collector, fleet_of(args.nodes, args.costs, tracing(args.trace_sample, collector)) as fleet:
        bench = Bench(fleet, args)
        if args.seconds:
            bench.throughput("streams", args.streams, args.tokens, True, args.seconds)
            bench.throughput("short", args.connections, 1, False, args.seconds)
            bench.first_tokens(args.seconds)
        if args.hold:
            bench.hold(args.hold)


if __name__ == "__main__":
    main()
