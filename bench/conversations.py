"""Conversations over a working set larger than the KV cache: TTFT by turn, on OpenAI-compatible servers.

    python bench/make_checkpoint.py /tmp/l --shape llama-8b --config-only
    python bench/conversations.py /tmp/l --conversations 20 --out "$OUT" \\
        --node-flags "--load-format dummy --max-model-len 24576 --kv-cache-memory 5600M" \\
        --serve "off=" --serve "host=--host-kv-memory 64G"
    python bench/conversations.py --conversations 20 --system vllm=http://127.0.0.1:8100

Every conversation takes its first turn, then every one its second, and so on, ``--concurrency`` of them at a time. The
prompt of a turn is the history of its conversation, with the answers of the server, and ``--tokens`` new random tokens.
With the defaults, histories grow to 20,400 tokens, and the working set to 408,000: ten times the cache of the example.

``--serve NAME=FLAGS`` starts ``pdserve serve MODEL`` with these flags and ``--node-flags``, and stops it after its
measurement; ``--system NAME=URL`` is a server that runs. All are measured one after the other with the same random
tokens, under a cache salt of their own. TTFT is from sending to the first token. ``cached`` is the share of prompt
tokens that the server reports as cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import statistics
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import uvloop
from goodput_fleets import LOCAL, FleetError, Processes, free_ports

from cli.bench.http_load import Endpoint, ServerError, Trace, complete, first_model
from cli.bench.requests import Request, completion_body, random_prompt
from pdserve.errors import shown
from pdserve.flags.value_types import positive_int
from pdserve.host.process import run_command


class Turn(NamedTuple):
    """Figures of a turn of all conversations, in seconds and tokens."""

    ttft: list[float]
    prompt_tokens: int
    cached_tokens: int


async def converse(endpoint: Endpoint, args: argparse.Namespace) -> list[Turn]:
    """Return the figures of each turn. Raises ServerError if a request fails."""
    model = await first_model(endpoint)
    salt = uuid.uuid4().hex
    rng = random.Random(args.seed)
    histories: list[list[int]] = [[] for _ in range(args.conversations)]
    places = asyncio.Semaphore(args.concurrency)

    async def send(prompt: list[int]) -> tuple[Trace, list[int]]:
        trace = Trace(time.perf_counter())
        answer = list[int]()
        body = completion_body(model, Request(0.0, prompt, args.answer_tokens), salt)
        async with places:
            await complete(endpoint, body, args.answer_tokens, trace, args.timeout, token_ids=answer)
        if trace.error:
            raise ServerError(f"{endpoint.url}: {trace.error}")
        return trace, answer

    for _ in range(3):  # kernels of a first prompt, a first decode and a first hit
        await send(random_prompt(random.Random("warm-up"), args.tokens, args.vocab))
    turns = []
    for _ in range(args.turns):
        prompts = [[*history, *random_prompt(rng, args.tokens, args.vocab)] for history in histories]
        answers = await asyncio.gather(*map(send, prompts))
        histories = [[*prompt, *answer] for prompt, (_, answer) in zip(prompts, answers, strict=True)]
        turns.append(
            Turn(
                [trace.ttft for trace, _ in answers],
                sum(map(len, prompts)),
                sum(trace.cached_tokens for trace, _ in answers),
            )
        )
    return turns


@contextmanager
def serving(name: str, flags: str, args: argparse.Namespace) -> Iterator[Endpoint]:
    """Start a node with an OpenAI server, and wait until it is ready. Raises FleetError."""
    (port,) = free_ports(1)
    url = f"http://{LOCAL}:{port}"
    with Processes(name, args.out) as processes:
        words = [*shlex.split(args.node_flags), *shlex.split(flags)]
        processes.start_module("serve", "cli", "serve", args.model, "--http", port, *words)
        end = time.monotonic() + args.start_timeout
        while not _is_ready(url):
            processes.check()
            if time.monotonic() > end:
                raise FleetError(f"{name} was not ready within {args.start_timeout:g} s; see its log in {args.out}")
            time.sleep(0.2)
        time.sleep(args.settle)
        yield Endpoint.of(url)


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
        return bool(answer.status == 200)
    return False


def table(results: dict[str, tuple[list[Turn], float]], args: argparse.Namespace) -> str:
    """Return the table in Markdown: of each turn, p50 and p99 of TTFT in ms and the cached share of each system."""
    names = list(results)
    lines = ["| turn | prompt tokens | " + " | ".join(f"{name}: TTFT p50 / p99 ms, cached" for name in names) + " |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for number in range(args.turns):
        cells = []
        length = 0
        for turns, _ in results.values():
            turn = turns[number]
            length = turn.prompt_tokens // len(turn.ttft)
            cells.append(f"{_ms(turn.ttft, 50)} / {_ms(turn.ttft, 99)}, {turn.cached_tokens / turn.prompt_tokens:.0%}")
        lines.append(f"| {number + 1} | {length} | " + " | ".join(cells) + " |")
    totals = (f"{seconds:.1f} s" for _, seconds in results.values())
    return "\n".join([*lines, "| all | | " + " | ".join(totals) + " |"])


def _ms(seconds: list[float], percent: int) -> str:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return f"{1e3 * cuts[percent - 1]:.1f}"


def run(args: argparse.Namespace) -> int:
    results: dict[str, tuple[list[Turn], float]] = {}

    def measure(name: str, endpoint: Endpoint) -> None:
        began = time.perf_counter()
        turns = uvloop.run(converse(endpoint, args))
        results[name] = turns, time.perf_counter() - began
        print(f"{name}: {results[name][1]:.1f} s", file=sys.stderr, flush=True)
        figures = {system: [turn._asdict() for turn in turns] for system, (turns, _) in results.items()}
        (args.out / "conversations.json").write_text(json.dumps(figures))

    for name, url in args.system:
        measure(name, Endpoint.of(url))
    for name, flags in args.serve:
        try:
            with serving(name, flags, args) as endpoint:
                measure(name, endpoint)
        except FleetError as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            return 1
    tokens = args.turns * (args.tokens + args.answer_tokens)
    print(f"{args.conversations} conversations of {tokens} tokens, {args.concurrency} at a time")
    print(table(results, args))
    return 0


def _named(text: str) -> tuple[str, str]:
    name, separator, rest = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{shown(text)} is invalid; use NAME=…")
    return name, rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="checkpoint, for --serve")
    parser.add_argument("--serve", type=_named, action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--system", type=_named, action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--node-flags", default="", metavar="FLAGS", help="of every --serve")
    parser.add_argument("--conversations", type=positive_int, default=20)
    parser.add_argument("--turns", type=positive_int, default=20)
    parser.add_argument("--tokens", type=positive_int, default=1000, help="new tokens of a turn (default %(default)s)")
    parser.add_argument("--answer-tokens", type=positive_int, default=20, help="of each turn (default %(default)s)")
    parser.add_argument("--concurrency", type=positive_int, default=1, help="turns at a time (default %(default)s)")
    parser.add_argument("--vocab", type=positive_int, default=4096, help="vocabulary size; prompts use its upper half")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds after the start of a --serve")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="for logs and conversations.json")
    args = parser.parse_args()
    if not (args.serve or args.system) or (args.serve and not args.model):
        parser.error("name a --system, or MODEL and a --serve")
    args.out.mkdir(parents=True, exist_ok=True)
    return run(args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the processes
    sys.exit(run_command(main))
