"""Speed of one engine process without router and gRPC: decode step time by batch size, prefill time by prompt length.

    python bench/engine_steps.py MODEL [--batches 1,8,32] [--prompts 256,64x1024] [any flag of a node]

A step covers the whole engine: message over the socket, schedule, plan, forward pass, sampling, token back at the
frontend. Prompts are random token ids, so the prefix cache never hits. The time of a decode step is the mean while all
requests of a batch decode, the best of ``--repeat`` after a run that is not measured; ``host_ms`` is the part for
scheduling, planning and launching. With drafts it is the time per token of a sequence; ``drafts`` and ``accepted``
are per sequence and step. A prefill (one prompt, or several at once: 64x1024) ends when all prompts have their first
token; best of three.

With ``--kv-events`` a node's KV events are published meanwhile, without a subscriber: alternate runs with and without.

``--costs-out`` writes the input of ``pdserve plan --costs``. Handoffs are not measured: ``kv_transfer.py`` and
``handoff.py`` measure the values that replace the estimates in that file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import shlex
import subprocess
import sys
import time
from array import array
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from cli.plan.costs import Costs, Shape, costs_as_toml, rising
from node.engine_client.client import EngineClient
from node.engine_client.launched_engine import launch_engine
from node.engine_client.request_events import Event
from node.kv_events.event_log import group_kinds
from node.kv_events.options import KVEventOptions
from node.kv_events.publisher import KVEventPublisher
from pdserve.config.device import detect_devices
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import add_node_flags, node_options_from
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.ipc.messages import EventBatch, Mode, RankPlacement, Refused, Submit, Totals
from pdserve.logprobs import TokenLogprobs
from pdserve.records import FinishReason
from pdserve.request_cost import HANDOFF_SECONDS
from pdserve.sampling_params import SamplingParams

PROMPT = 64  # prompt tokens of the decode runs
LONG_BATCH = 8  # largest batch for decode runs with long prompts
NETWORK = 12.5  # 10^9 bytes/s
SKIPPED = 8  # tokens of the request that starts last, before its steps are measured


class Mark(NamedTuple):
    """A moment of a run."""

    seconds: float
    num_tokens: int  # tokens of all requests so far
    totals: Totals


class Run:
    """The outputs of a batch of requests, and when all of them decoded."""

    def __init__(self, engine: EngineClient, batch: int) -> None:
        self.done = asyncio.Event()
        self.is_ending = False  # a request has all its tokens
        self._engine = engine
        self._batch = self._waiting = self._remaining = batch
        self._num_tokens = 0
        self._marks: list[Mark] = []  # per token of the last request to start, until another request ends

    def on_start(self) -> bool:
        """Count a request with its first token; return whether it is the last one."""
        self._waiting -= 1
        return not self._waiting

    def on_token(self, is_last: bool) -> None:
        self._num_tokens += 1
        if is_last and not self.is_ending:
            self._marks.append(Mark(time.perf_counter(), self._num_tokens, self._engine.status.totals))

    def on_end(self) -> None:
        self.is_ending = True
        self._remaining -= 1
        if not self._remaining:
            self.done.set()

    def step(self) -> Step:
        """Return the mean step in which all requests decoded. Raises ValueError if there were too few."""
        if len(self._marks) < SKIPPED + 2:
            raise ValueError(f"all requests decoded in {len(self._marks)} steps only; use more --steps")
        first = self._marks[SKIPPED]
        last = self._marks[-1]
        seconds = (last.seconds - first.seconds) * self._batch / (last.num_tokens - first.num_tokens)
        before = first.totals
        after = last.totals
        steps = max(after.steps - before.steps, 1)
        accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        return Step(
            seconds,
            (after.host_seconds - before.host_seconds) / steps,
            (after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens) / (steps * self._batch),
            accepted / (steps * self._batch),
        )


class Step(NamedTuple):
    seconds: float  # per token of a sequence
    host: float  # seconds in which the step loop worked
    drafts: float  # per sequence
    accepted: float  # accepted drafts per sequence


class RequestOutputs:
    """Handles the events of one request."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_started = self._is_last = False

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        if not self._has_started:
            self._has_started = True
            self._is_last = self._run.on_start()
        self._run.on_token(self._is_last)
        if finish is not None:
            self._run.on_end()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Refused):
            raise RuntimeError(event.message)


class Bench:
    """Sends requests to an engine and waits until all are done."""

    def __init__(self, engine: EngineClient, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    async def run(self, batch: int, prompt: int, output: int) -> Run:
        """Run ``batch`` requests with ``prompt`` random tokens and ``output`` generated tokens each."""
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        prompts = [array("I", self._random.choices(range(self._vocab_size), k=prompt)) for _ in range(batch)]
        run = Run(self._engine, batch)
        for prompt_ids in prompts:
            request = self._engine.open(RequestOutputs(run))
            self._engine.send(Submit(request, prompt_ids.tobytes(), sampling, Mode.LOCAL))
        await run.done.wait()
        return run

    async def decode_step(self, batch: int, steps: int, repeat: int, prompt: int = PROMPT) -> Step:
        """Measure a step, and the host's work in it."""
        output = SKIPPED + steps + SKIPPED + batch // 8  # requests may start in several steps
        runs = [await self.run(batch, prompt, output) for _ in range(1 + repeat)]
        return min(run.step() for run in runs[1:])

    async def context(self, decode: dict[int, float], prompt: int, steps: int, repeat: int) -> float:
        """Measure the seconds that a token of context adds to a step, per sequence."""
        batch = max(size for size in decode if size <= LONG_BATCH)
        long = await self.decode_step(batch, steps, repeat, prompt)
        return max(0.0, (long.seconds - decode[batch]) / (batch * (prompt - PROMPT)))

    async def prefill(self, batch: int, prompt: int) -> float:
        """Return the seconds until all of ``batch`` prompts have their first token."""
        times = list[float]()
        for _ in range(3):
            start = time.perf_counter()
            await self.run(batch, prompt, 1)
            times.append(time.perf_counter() - start)
        return min(times)


async def run(args: argparse.Namespace) -> None:
    devices = detect_devices(args.device, args.pp * args.tp)
    node_options = node_options_from(args)
    config = resolve(node_options, devices[0])
    if config.uncompiled_kernels:  # later starts have FlashInfer
        config = resolve(msgspec.structs.replace(node_options, attention_backend="flashinfer"), devices[0])
    engine = EngineClient(config, "", RankPlacement(devices), launch_engine(len(devices)), cache_changes=args.kv_events)
    publisher = None
    if args.kv_events:
        options = KVEventOptions("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        layout = config.kv_layout
        publisher = KVEventPublisher(options, group_kinds(layout, config.model.state is not None), layout.block_size)
        publisher.start()
        engine.on_batch = partial(publish, publisher)
    start = time.perf_counter()
    await engine.start(config)
    try:
        print(
            json.dumps({"start_s": round(time.perf_counter() - start, 2), "runner": config.decision.runner}), flush=True
        )
        bench = Bench(engine, config.model.vocab_size)
        await bench.run(1, 32, 8)
        decode = dict[int, float]()
        prefill = dict[int, float]()
        for batch in args.batches:
            step = await bench.decode_step(batch, args.steps, args.repeat)
            decode[batch] = step.seconds
            figures = {"ms_per_step": round(step.seconds * 1e3, 3), "tok_per_s": round(batch / step.seconds)}
            figures["host_ms"] = round(step.host * 1e3, 3)
            if config.max_drafts:
                figures |= {"drafts": round(step.drafts, 2), "accepted": round(step.accepted, 2)}
            print(json.dumps({"decode_batch": batch} | figures), flush=True)
        for batch, prompt in args.prompts:
            seconds = await bench.prefill(batch, prompt)
            if batch == 1:
                prefill[prompt] = seconds
            figures = {"ms": round(seconds * 1e3, 2), "tok_per_s": round(batch * prompt / seconds)}
            print(json.dumps({"prompts": batch, "prefill_tokens": prompt} | figures), flush=True)
        if args.costs_out:
            context = await bench.context(decode, max(prefill), args.steps, args.repeat)
            args.costs_out.write_text(costs_as_toml(costs_of(config, decode, prefill, context)))
    finally:
        await engine.shutdown()
        if publisher is not None:
            publisher.close()
            print(json.dumps({"kv_event_batches": publisher.num_batches}), flush=True)


def publish(publisher: KVEventPublisher, batch: EventBatch) -> None:
    for changes in batch.cache_changes:
        publisher.publish(changes)


def costs_of(config: NodeConfig, decode: dict[int, float], prefill: dict[int, float], context: float) -> Costs:
    """Return measured seconds by batch, by prompt and per token of context in the format of ``pdserve plan``."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    shape = Shape.of(config.model, config.kv_layout.dtype)
    return Costs(
        model=config.served_model_name,
        gpu=config.device.name,
        hardware=f"{config.device.name}, {platform.processor() or platform.machine()}",
        commit=commit.stdout.strip() or "unknown",
        command=shlex.join(["bench/engine_steps.py", *sys.argv[1:]]),
        shape=shape,
        estimated=(
            f"second_token_ms: {1e3 * HANDOFF_SECONDS:g} ms",
            f"kv_gb_per_s: {NETWORK:g}, as of a network of 100 Gbit/s",
        ),
        pp=config.parallel.pp,
        tp=config.parallel.tp,
        prefill_ms=rising([(tokens, 1e3 * seconds) for tokens, seconds in prefill.items()]),
        decode_ms=rising([(batch, 1e3 * seconds) for batch, seconds in decode.items()]),
        context_ns=round(1e9 * context, 3),
        kv_tokens=config.kv_layout.num_tokens,
        step_tokens=config.max_batch_tokens,
        second_token_ms=((0.0, 1e3 * HANDOFF_SECONDS),),
        kv_gb_per_s=NETWORK,
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _prompts(text: str) -> list[tuple[int, int]]:
    """Parse "256,64x1024" as (number of prompts, tokens of each)."""
    pairs = [part.rpartition("x") for part in text.split(",")]
    return [(int(count or 1), int(tokens)) for count, _, tokens in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_node_flags(parser)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--prompts", type=_prompts, default=[(1, 256), (1, 1024)])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--kv-events", action="store_true", help="publish KV events meanwhile")
    parser.add_argument("--costs-out", type=Path, metavar="FILE", help="for pdserve plan --costs")
    args = parser.parse_args()
    if args.costs_out and (
        min(args.batches) > LONG_BATCH or max([t for n, t in args.prompts if n == 1], default=0) <= PROMPT
    ):
        parser.error(f"--costs-out needs a batch of {LONG_BATCH} or fewer, and a prompt of more than {PROMPT} tokens")
    try:
        asyncio.run(run(args))
    except PdserveError as exc:
        print(f"engine_steps.py: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
