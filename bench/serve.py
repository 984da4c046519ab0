"""Benchmark of a running OpenAI-compatible server: TTFT, ITL and throughput, with percentiles.

Closed loop: each of N clients sends its next request when the last one has ended.

    python bench/serve.py --url http://127.0.0.1:8000 --concurrency 8 --requests 200

Open loop: requests arrive as a Poisson process, whether or not earlier ones have ended.

    python bench/serve.py --url http://127.0.0.1:8000 --rate 4 --requests 200 --json serve.json --plot serve.png

Prompts are random token ids; the first ``--shared-prefix`` of them are equal in all prompts. Outputs have a fixed
length (``ignore_eos``). A token's time is the time at which its chunk was read from the socket; ITL is the gap between
consecutive tokens of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PERCENTILES = (50, 90, 99)


@dataclass
class Trace:
    """The times of one request, in seconds of time.perf_counter()."""

    start: float
    tokens: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


def parse_range(text: str) -> tuple[int, int]:
    """Parse "128" or "64-256" as the inclusive bounds of a uniform distribution."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


class Load:
    """Sends random requests and records their traces."""

    def __init__(self, args: argparse.Namespace, client: httpx.AsyncClient, model: str) -> None:
        self._args = args
        self._client = client
        self._model = model
        self._random = random.Random(args.seed)
        self._prefix = self._ids(args.shared_prefix)
        self.traces: list[Trace] = []

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._args.vocab // 2, self._args.vocab) for _ in range(count)]

    def _body(self) -> dict[str, Any]:
        length = self._random.randint(*self._args.prompt_tokens)
        return {
            "model": self._model,
            "prompt": self._prefix + self._ids(max(1, length - len(self._prefix))),
            "max_tokens": self._random.randint(*self._args.output_tokens),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    async def one(self) -> None:
        body = self._body()
        trace = Trace(time.perf_counter())
        self.traces.append(trace)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    trace.error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
                    return
                async for line in sse_lines(response):
                    if line.startswith("data: {"):
                        self.count(trace, line)
        except httpx.HTTPError as exc:
            trace.error = f"{type(exc).__name__}: {exc}"
        if not trace.error and len(trace.tokens) != body["max_tokens"]:
            trace.error = f"{len(trace.tokens)} tokens instead of {body['max_tokens']}"

    @staticmethod
    def count(trace: Trace, line: str) -> None:
        now = time.perf_counter()
        event = json.loads(line[6:])
        if "error" in event:
            trace.error = event["error"]["message"]
        for choice in event.get("choices", ()):
            trace.tokens += [now] * len(choice.get("token_ids") or ())

    async def closed(self, concurrency: int, requests: int) -> None:
        remaining = iter(range(requests))

        async def client() -> None:
            for _ in remaining:
                await self.one()

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def open(self, rate: float, requests: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(requests):
                group.create_task(self.one())
                await asyncio.sleep(self._random.expovariate(rate))


async def sse_lines(response: httpx.Response) -> AsyncIterator[str]:
    r"""Yield the lines of a server-sent event stream, split at \n only.

    httpx's aiter_lines also splits at U+2028 and other separators, which outputs may contain.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def percentiles(values: list[float]) -> dict[str, float]:
    """Return percentiles in ms of values in seconds; empty input gives an empty result."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {f"p{p}": round(cuts[p - 1] * 1e3, 3) for p in PERCENTILES} | {"max": round(max(values) * 1e3, 3)}


def summarize(traces: list[Trace], seconds: float) -> dict[str, Any]:
    good = [trace for trace in traces if not trace.error]
    tokens = sum(len(trace.tokens) for trace in good)
    return {
        "requests": len(traces),
        "failed": len(traces) - len(good),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "ttft_ms": percentiles([trace.ttft for trace in good]),
        "itl_ms": percentiles([gap for trace in good for gap in trace.gaps]),
        "e2e_ms": percentiles([trace.tokens[-1] - trace.start for trace in good]),
    }


def plot(traces: list[Trace], path: Path, title: str) -> None:
    """Plot the cumulative distributions of TTFT and ITL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [trace for trace in traces if not trace.error]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    series = {"TTFT": [t.ttft for t in good], "ITL": [gap for t in good for gap in t.gaps]}
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        ordered = sorted(value * 1e3 for value in values)
        axis.step(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axis.set(xlabel=f"{name}, ms", ylabel="% of requests" if name == "TTFT" else "% of gaps", ylim=(0, 100))
        axis.set_xscale("log")
        axis.grid(alpha=0.3, which="both")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=args.timeout, limits=limits) as client:
        listing = (await client.get("/v1/models")).raise_for_status().json()
        load = Load(args, client, args.model or listing["data"][0]["id"])
        for _ in range(args.warmup):
            await load.one()
        load.traces.clear()
        start = time.perf_counter()
        if args.rate:
            await load.open(args.rate, args.requests)
        else:
            await load.closed(args.concurrency, args.requests)
        result = summarize(load.traces, time.perf_counter() - start)
    loop = f"open loop, {args.rate} requests/s" if args.rate else f"closed loop, {args.concurrency} clients"
    result["load"] = f"{loop}, prompts {args.prompt_tokens}, outputs {args.output_tokens} tokens"
    result["errors"] = sorted({trace.error for trace in load.traces if trace.error})[:5]
    if args.plot:
        plot(load.traces, args.plot, result["load"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first listed model")
    parser.add_argument("--concurrency", type=int, default=8, help="clients of the closed loop")
    parser.add_argument("--rate", type=float, help="requests per second of the open loop")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=2, help="requests before the measurement")
    parser.add_argument("--prompt-tokens", type=parse_range, default=(256, 256), metavar="N|LOW-HIGH")
    parser.add_argument("--output-tokens", type=parse_range, default=(64, 64), metavar="N|LOW-HIGH")
    parser.add_argument("--shared-prefix", type=int, default=0, help="prompt tokens that all requests share")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary size; prompts use its upper half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per request")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    try:
        result = asyncio.run(run(args))
    except httpx.HTTPError as exc:
        print(f"serve.py: {args.url}: {exc or type(exc).__name__}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
