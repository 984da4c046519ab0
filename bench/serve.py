"""Benchmark of a running OpenAI-compatible server, closed loop: TTFT, ITL and throughput, with percentiles.

    python bench/serve.py --url http://127.0.0.1:8000 --concurrency 8 --requests 200 --json serve.json --plot serve.png

Each of N clients sends its next request when the last one has ended; bench/goodput.py is the open loop. Prompts are
random token ids; the first ``--shared-prefix`` of them are equal in all prompts. Outputs have a fixed length
(``ignore_eos``). ITL is the gap between consecutive tokens of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from http_load import Endpoint, Trace, complete, percentiles
from loads import Request, completion_body, random_prompt
from systems import first_model

from pdserve.process import run_command


def parse_range(text: str) -> tuple[int, int]:
    """Parse "128" or "64-256" as the inclusive bounds of a uniform distribution."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


class Load:
    """Sends random requests and records their traces."""

    def __init__(self, args: argparse.Namespace, endpoint: Endpoint, model: str) -> None:
        self._args = args
        self._endpoint = endpoint
        self._model = model
        self._random = random.Random(args.seed)
        self._prefix = random_prompt(self._random, args.shared_prefix, args.vocab)
        self.traces: list[Trace] = []

    async def run(self, concurrency: int, requests: int) -> None:
        remaining = iter(range(requests))

        async def client() -> None:
            for _ in remaining:
                await self._send()

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _send(self) -> None:
        length = self._random.randint(*self._args.prompt_tokens) - len(self._prefix)
        prompt = self._prefix + random_prompt(self._random, max(1, length), self._args.vocab)
        num_tokens = self._random.randint(*self._args.output_tokens)
        body = completion_body(self._model, Request(0.0, prompt, num_tokens))
        self.traces.append(trace := Trace(time.perf_counter()))
        await complete(self._endpoint, body, num_tokens, trace, self._args.timeout)


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
    endpoint = Endpoint.of(args.url)
    load = Load(args, endpoint, args.model or await first_model(endpoint))
    await load.run(1, args.warmup)
    load.traces.clear()
    start = time.perf_counter()
    await load.run(args.concurrency, args.requests)
    result = summarize(load.traces, time.perf_counter() - start)
    lengths = f"prompts {args.prompt_tokens}, outputs {args.output_tokens} tokens"
    result["load"] = f"closed loop, {args.concurrency} clients, {lengths}"
    result["errors"] = sorted({trace.error for trace in load.traces if trace.error})[:5]
    if args.plot:
        plot(load.traces, args.plot, result["load"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first listed model")
    parser.add_argument("--concurrency", type=int, default=8, help="clients")
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
    result = uvloop.run(run(args))
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
