"""Open-loop loads for benches: requests with random lengths and arrivals, or those of a trace."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cli.bench.http_load import Trace
from cli.bench.requests import Request, random_prompt
from cli.plan.workload import BLOCK, LONGEST, TraceRequest, Workload, read_trace, workload_of, workload_of_trace
from pdserve.errors import shown
from pdserve.flags.value_types import positive_int


class Load(NamedTuple):
    """The requests at one rate, equal for every system. ``name`` is for tables."""

    rate: float  # requests/s; infinite: all at once
    requests: list[Request]
    name: str


def make_load(
    workload: Workload, rate: float, prompts: Sequence[list[int]], max_output: int = LONGEST, name: str = ""
) -> Load:
    ends = itertools.accumulate(gap / rate for gap in workload.gaps)
    outputs = (min(output, max_output) for output in workload.outputs)
    return Load(rate, [Request(*request) for request in zip(ends, prompts, outputs, strict=True)], name or f"{rate:g}")


def random_load(
    args: argparse.Namespace, rate: float, num_requests: int, kind: str = "", lengths: tuple[str, str] | None = None
) -> Load:
    """Return requests of random lengths; prompts differ between rates, seeds and kinds.

    ``lengths`` of prompts and outputs replace the lengths of ``args``.
    """
    rng = random.Random(f"{args.seed} {rate:g} {kind}")
    inputs, outputs = lengths or (args.prompt_tokens, args.output_tokens)
    workload = workload_of(inputs, outputs, 0.0, num_requests, rng.getrandbits(60))
    cut = (min(length, args.max_prompt_tokens) for length in workload.prompts)
    prompts = [random_prompt(rng, n, args.vocab) for n in cut]
    return make_load(workload, rate, prompts, args.max_output_tokens, kind)


def trace_loads(args: argparse.Namespace) -> list[Load]:
    """Return the first ``--requests`` requests of the trace at each rate. Raises ConfigError."""
    requests: list[TraceRequest] = list(itertools.islice(read_trace(args.trace), args.requests))
    workload, own_rate = workload_of_trace(requests)
    prompts = [trace_prompt(request, args.vocab)[: args.max_prompt_tokens] for request in requests]
    return [make_load(workload, rate, prompts, args.max_output_tokens) for rate in args.rates or [own_rate]]


def make_loads(args: argparse.Namespace) -> list[Load]:
    """Return the loads to measure. Raises ConfigError."""
    if args.trace is not None:
        return trace_loads(args)
    loads = [random_load(args, rate, max(2, round(rate * args.seconds))) for rate in args.rates or [8.0, 16.0, 24.0]]
    for rate, *lengths in args.also:
        name = f"{rate:g} ({' → '.join(lengths)})"
        loads.append(random_load(args, rate, max(2, round(rate * args.seconds)), name, (lengths[0], lengths[1])))
    return loads


def trace_prompt(request: TraceRequest, vocabulary: int, shrink: int = 1) -> list[int]:
    """Return a trace's prompt with its length divided by ``shrink``; equal hash ids yield equal token ids."""
    size = BLOCK // shrink
    tokens: list[int] = []
    for number in request.hash_ids:
        tokens += random_prompt(random.Random(number), size, vocabulary)
    return tokens[: max(1, request.input_length // shrink)]


async def open_loop(
    requests: Sequence[Request], send: Callable[[int, Trace], Coroutine[Any, Any, None]]
) -> list[Trace]:
    """Call ``send`` for each request at its time, whether or not earlier ones have ended; return the traces."""
    began = time.perf_counter()
    traces = [Trace(began + request.at) for request in requests]
    async with asyncio.TaskGroup() as group:
        for number, trace in enumerate(traces):
            await asyncio.sleep(max(0.0, trace.due - time.perf_counter()))
            group.create_task(send(number, trace))
    return traces


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    add_request_flags(parser)
    parser.add_argument("--rates", type=parse_rates, metavar="R,…", help="requests/s; default 8,16,24 or the trace's")
    lengths = "as in `pdserve plan` (default %(default)s)"
    parser.add_argument("--prompt-tokens", default="mean=2000,sigma=0.8", metavar="LENGTH", help=lengths)
    parser.add_argument("--output-tokens", default="mean=200,sigma=0.8", metavar="LENGTH", help=lengths)
    also = "a further rate with lengths of its own, such as 20:mean=512,sigma=0.8:mean=512,sigma=0.8"
    parser.add_argument("--also", type=parse_also, action="append", default=[], metavar="R:IN:OUT", help=also)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and prompts in Mooncake's format")
    parser.add_argument("--requests", type=positive_int, default=500, help="first requests of the trace")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of random requests, without rates and lengths."""
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals per rate (default %(default)s)")
    parser.add_argument("--max-prompt-tokens", type=positive_int, default=12000, metavar="N", help="cuts longer ones")
    parser.add_argument("--max-output-tokens", type=positive_int, default=1000, metavar="N", help="cuts longer ones")
    parser.add_argument("--vocab", type=positive_int, default=4096, help="vocabulary size; prompts use its upper half")
    parser.add_argument("--seed", type=int, default=0)


def parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0.0 < rate <= 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{shown(text)} is invalid; use requests per second such as 8,16,24")
    return rates


def parse_also(text: str) -> tuple[float, str, str]:
    rate, _, lengths = text.partition(":")
    prompt, _, output = lengths.partition(":")
    if not output:
        raise argparse.ArgumentTypeError(f"{shown(text)} is invalid; use RATE:PROMPT-LENGTH:OUTPUT-LENGTH")
    return parse_rates(rate)[0], prompt, output
