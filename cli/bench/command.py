"""``pdserve bench``: load on an OpenAI-compatible server; latencies, throughput and cached tokens."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import uvloop
from rich.console import Console

from cli.bench.datasets import read_dataset
from cli.bench.flags import Range, make_parser
from cli.bench.http_load import CHATS, COMPLETIONS, Endpoint, ServerError, Trace, complete, first_model
from cli.bench.images import random_image_url
from cli.bench.progress import progress
from cli.bench.report import Report, check_plot, draw, show
from cli.bench.requests import Request, chat_body, completion_body, random_prompt, random_text
from cli.router_url import api_key, base_url
from pdserve.errors import ConfigError, NodeError, plain
from pdserve.host.process import run_command
from pdserve.images import MAX_IMAGES

_CONCURRENCY = 8
_OUTPUTS = Range(64, 64)  # tokens of answers to random prompts


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: bench(make_parser().parse_args(argv)))


def bench(args: argparse.Namespace) -> int:
    """Measure and report; the exit status is 1 if a request failed. Raises ConfigError or NodeError."""
    if args.plot:
        check_plot()
    if args.vocab < 2:
        raise ConfigError(f"--vocab {args.vocab} is too small; use 2 or more")
    if args.image:
        _check_images(args)
    args.endpoint = args.endpoint or (CHATS if args.image else COMPLETIONS)
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        _check_file(flag, file)
    if args.dataset_path is None and args.dataset_name not in (None, "random"):
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE; add it")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31)
    report = uvloop.run(_measure(args))
    show(report, Console(highlight=False))
    try:
        if args.json:
            args.json.write_text(json.dumps(report.figures(), indent=2) + "\n")
        if args.plot:
            draw(report, args.plot)
    except OSError as exc:
        raise ConfigError(f"{exc.filename} cannot be written: {exc.strerror}") from exc
    return 1 if report.failed else 0


def _check_images(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if args.endpoint == COMPLETIONS:
        raise ConfigError(f"--image sends chats; leave out --endpoint {COMPLETIONS}")
    if (number := sum(size.number for size in args.image)) > MAX_IMAGES:
        raise ConfigError(f"--image asks for {number} images in a request, the limit is {MAX_IMAGES}; ask for fewer")


def _check_file(flag: str, file: Path | None) -> None:
    """Raise ConfigError before the load if its figures could not be written after it."""
    if file is not None and (not file.parent.is_dir() or file.is_dir() or not os.access(file.parent, os.W_OK)):
        raise ConfigError(f"{flag} {file} cannot be written: {file.parent} must be a folder that you may write to")


async def _measure(args: argparse.Namespace) -> Report:
    endpoint = Endpoint.of(base_url(args.url), api_key(args))
    requests = _requests(args, random.Random(args.seed), args.num_warmups + args.num_prompts)
    if args.image:
        requests = _with_images(args, requests)
    try:
        model = args.model or await first_model(endpoint)
    except ServerError as exc:
        raise NodeError(str(exc)) from exc
    body = chat_body if args.endpoint == CHATS else completion_body
    bodies = [body(model, request) for request in requests]
    warm = []
    if args.num_warmups:
        async with progress(args.num_warmups, "requests of the warm-up") as ended:
            warm = await _send_all(endpoint, bodies[: args.num_warmups], args, ended)
    if warm and all(trace.error for trace in warm):
        raise NodeError(f"every request of the warm-up failed, the first one with: {warm[0].error}")
    arrivals = random.Random(f"arrivals {args.seed}")
    async with progress(args.num_prompts, "requests") as ended:
        began = time.perf_counter()
        traces = await _send_all(endpoint, bodies[args.num_warmups :], args, ended, arrivals)
        seconds = time.perf_counter() - began
    return Report(
        f"{model} at {endpoint.url}", _load_text(args), args.seed, seconds, traces, requests[args.num_warmups :]
    )


def _requests(args: argparse.Namespace, rng: random.Random, number: int) -> list[Request]:
    """Return random requests, or those of the data set, which repeat if there are too few. Raises ConfigError."""
    outputs = args.random_output_len
    if args.dataset_path is not None:
        examples = read_dataset(args.dataset_path)
        rng.shuffle(examples)
        chosen = islice(cycle(examples), number)
        return [Request(0.0, [], rng.randint(*outputs) if outputs else num, text) for text, num in chosen]
    inputs = args.random_input_len
    outputs = outputs or _OUTPUTS
    prefix = args.random_prefix_len
    if args.endpoint == CHATS:
        shared = random_text(rng, prefix)
        texts = [f"{shared} {random_text(rng, rng.randint(*inputs))}".strip() for _ in range(number)]
        return [Request(0.0, [], rng.randint(*outputs), text) for text in texts]
    ids = random_prompt(rng, prefix, args.vocab)
    prompts = [ids + random_prompt(rng, rng.randint(*inputs), args.vocab) for _ in range(number)]
    return [Request(0.0, prompt, rng.randint(*outputs)) for prompt in prompts]


def _with_images(args: argparse.Namespace, requests: Sequence[Request]) -> list[Request]:
    """Return requests with images of their own."""
    rng = random.Random(f"images {args.seed}")
    sizes = [size for size in args.image for _ in range(size.number)]
    return [request._replace(images=tuple(random_image_url(rng, size) for size in sizes)) for request in requests]


async def _send_all(
    endpoint: Endpoint,
    bodies: list[bytes],
    args: argparse.Namespace,
    ended: Callable[[], None],
    arrivals: random.Random | None = None,
) -> list[Trace]:
    """Send each body when it is due and fewer requests than the limit are in flight; ``arrivals`` spreads the times."""
    rate = args.request_rate if arrivals else None
    slots = asyncio.Semaphore(args.max_concurrency or (len(bodies) if rate else _CONCURRENCY))
    due = time.perf_counter()
    traces = []

    async def send(body: bytes, trace: Trace) -> None:
        try:
            await complete(endpoint, body, None, trace, args.timeout, path=args.endpoint)
        finally:
            slots.release()
            ended()

    async with asyncio.TaskGroup() as group:
        for body in bodies:
            if rate and arrivals:
                due += arrivals.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await slots.acquire()
            traces.append(trace := Trace(due))
            group.create_task(send(body, trace))
    return traces


def _load_text(args: argparse.Namespace) -> str:
    limit = args.max_concurrency or (None if args.request_rate else _CONCURRENCY)
    pace = [f"{plain(args.request_rate)} per second"] if args.request_rate else []
    pace += [f"{limit} at once"] if limit else []
    prefix = f" after {args.random_prefix_len:,} shared ones" if args.random_prefix_len else ""
    unit = "words" if args.endpoint == CHATS else "tokens"
    lengths = f"prompts of {args.random_input_len} {unit}{prefix}, answers of {args.random_output_len or _OUTPUTS}"
    if args.dataset_path is not None:
        answers = f"answers of {args.random_output_len}" if args.random_output_len else "answers as long as there"
        lengths = f"prompts of {args.dataset_path.name}, {answers}"
    images = f"images of {', '.join(map(str, args.image))}; " if args.image else ""
    return f"{args.num_prompts:,} requests, {', at most '.join(pace)}; {lengths}; {images}seed {args.seed}"
