"""Throughput of a router: streamed tokens/s, short requests/s, and the latency that it adds to the first token.

    PYTHONPATH=.:tests/support python bench/router_load.py --nodes 64 --streams 256 --seconds 10

Simulated decode nodes, a router and closed-loop clients, each in its own process.

    streams   streamed completions of ``--tokens`` tokens; counts the tokens that arrive in the window
    short     completions of one token, not streamed, over persistent connections
    first     with half the streams running, probes go through the router and directly to a node by gRPC; the added
              latency is the difference of their times to the first token at a percentile
    hold      half the streams run for ``--hold`` seconds; prints the router's memory over time

CPU is user + system time of the router process over wall time; it can exceed 1 because gRPC has threads.
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

from pdserve.checkpoint.hub import EMBEDDED_MODEL

CLIENT_PROCESSES = 4
WARM_UP = 2.0  # seconds before a window opens
STARTED_AT_ONCE = 8  # nodes


class Stream(asyncio.Protocol):
    """A connection that repeats a request; ``progress`` gets received bytes and returns the number of ended answers."""

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
        """Count tokens and return the number of ended answers.

        A marker split across two packets is not counted; this is rare and only lowers the result.
        """
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
    """Run clients in this process and send the numbers of tokens and answers in the window over ``pipe``."""

    async def load() -> tuple[int, int]:
        counter = Counter(streamed)
        loop = asyncio.get_running_loop()
        request = http_request(tokens, streamed)
        for _ in range(connections):
            await loop.create_connection(lambda: Stream(request, counter.take), "127.0.0.1", port)
            await asyncio.sleep(WARM_UP / 2 / connections)  # staggered, or the nodes' steps would be in phase
        await asyncio.sleep(WARM_UP)
        before = counter.tokens, counter.answers
        await asyncio.sleep(seconds)
        return counter.tokens - before[0], counter.answers - before[1]

    pipe.send(asyncio.run(load()))


class Load:
    """Running client processes; ``result`` waits for them."""

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
        """Wait for the clients; return the tokens and answers in the window."""
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
        before = self._cpu()
        started = time.perf_counter()
        num_tokens, answers = load.result()
        cpu = (self._cpu() - before) / (time.perf_counter() - started)
        self._print(
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
        """Probe the router and a node directly, with half the streams running."""
        load = Load(self._port, self._args.streams // 2, self._args.tokens, True, seconds + WARM_UP)
        time.sleep(WARM_UP * 2)
        before = self._cpu()
        started = time.perf_counter()
        routed, direct = asyncio.run(self._probe(seconds))
        cpu = (self._cpu() - before) / (time.perf_counter() - started)
        tokens, _ = load.result()
        for share in (50, 90, 99):
            with_router = percentile(routed, share)
            without = percentile(direct, share)
            self._print(f"first p{share}", ms=with_router, direct_ms=without, added_ms=with_router - without)
        self._print("first load", tokens_per_s=tokens / (seconds + WARM_UP), probes=len(routed), cpu=cpu)

    def hold(self, seconds: float) -> None:
        """Run half the streams and print the router's memory at eleven points in time."""
        load = Load(self._port, self._args.streams // 2, self._args.tokens, True, seconds)
        time.sleep(WARM_UP * 1.5)
        for point in range(11):
            self._print("hold", seconds=seconds * point / 10, mib=self._megabytes())
            time.sleep(seconds / 10 if point < 10 else 0.0)
        tokens, answers = load.result()
        self._print("hold", tokens_per_s=tokens / seconds, requests_per_s=answers / seconds)

    async def _probe(self, seconds: float) -> tuple[list[float], list[float]]:
        """Return the times to the first token through the router and directly, in ms."""
        routed: list[float] = []
        direct: list[float] = []
        end = time.perf_counter() + seconds
        tasks = []
        async with connect(random.choice(self._fleet.decode).address) as client:

            async def send_directly() -> None:
                started = time.perf_counter()
                direct.append(1e3 * ((await client.token_times(range(300, 316), 1))[0] - started))

            while time.perf_counter() < end:
                tasks += [asyncio.create_task(self._send_to_router(routed)), asyncio.create_task(send_directly())]
                await asyncio.sleep(random.uniform(0.005, 0.015))
            await asyncio.gather(*tasks)
        return routed, direct

    async def _send_to_router(self, times: list[float]) -> None:
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

    def _print(self, name: str, **figures: float) -> None:
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
    parser.add_argument("--tokens", type=int, default=512, help="tokens per stream")
    parser.add_argument("--connections", type=int, default=64, help="connections for short requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per window; 0: only hold")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds of hold; 0: skip it")
    parser.add_argument("--costs", default="step=0.0065,decode=0.0001", help="the nodes' --sim-costs")
    parser.add_argument("--trace-sample", metavar="SHARE", help="share of requests to trace (default: no traces)")
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
