"""Speed of one engine process without router and gRPC: decode step time per batch size, prefill time per prompt length.

    python bench/engine_steps.py MODEL [--batches 1,8,32] [--prompts 256,64x1024] [any flag of a node]

A step here is the whole engine's: command over the socket, schedule, plan, forward pass, sampling, token back at the
front. Prompts are random token ids, so nothing is found in the prefix cache. A decode step is (time of N+K tokens -
time of K tokens) / N, best of ``--repeat``; of it, ``host_ms`` is what scheduling, planning and launching take.
Prefill (of one prompt, or of several at once: 64x1024) is the time until all have their first token, best of three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from array import array

from engine.link import EngineLink, Event
from engine.messages import Mode, Output, Refused, Submit
from pdserve.config import resolve
from pdserve.device import detect_device
from pdserve.errors import PdserveError
from pdserve.flags import add_node_flags, options_from
from pdserve.records import SamplingParams

SHORT = 8  # tokens of the shorter of the two runs that a decode step is the difference of


class Bench:
    """Sends requests to an engine and waits until all are done."""

    def __init__(self, link: EngineLink, vocab_size: int) -> None:
        self._link = link
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    async def run(self, batch: int, prompt: int, output: int) -> float:
        """Seconds until ``batch`` requests with ``prompt`` random tokens have ``output`` tokens each."""
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        prompts = [array("I", self._random.choices(range(self._vocab_size), k=prompt)) for _ in range(batch)]
        done = asyncio.Event()
        remaining = batch

        def on_event(event: Event) -> None:
            nonlocal remaining
            if isinstance(event, Refused):
                raise RuntimeError(event.message)
            if isinstance(event, Output) and event.finish is not None:
                remaining -= 1
                if not remaining:
                    done.set()

        start = time.perf_counter()
        for tokens in prompts:
            self._link.send(Submit(self._link.open(on_event), tokens.tobytes(), sampling, Mode.LOCAL))
        await done.wait()
        return time.perf_counter() - start

    async def decode_step(self, batch: int, steps: int, repeat: int) -> tuple[float, float]:
        """Seconds of a step, and of the host's work in it."""
        short, short_host = await self._best(batch, SHORT, repeat)
        long, long_host = await self._best(batch, SHORT + steps, repeat)
        return (long - short) / steps, (long_host - short_host) / steps

    async def _best(self, batch: int, output: int, repeat: int) -> tuple[float, float]:
        runs = []
        for _ in range(repeat):
            before = self._link.status.host_seconds
            seconds = await self.run(batch, 64, output)
            runs.append((seconds, self._link.status.host_seconds - before))
        return min(seconds for seconds, _ in runs), min(host for _, host in runs)

    async def prefill(self, batch: int, prompt: int) -> float:
        return min([await self.run(batch, prompt, 1) for _ in range(3)])


async def run(args: argparse.Namespace) -> None:
    config = resolve(options_from(args), detect_device(args.device))
    link = EngineLink(config, agent="")
    start = time.perf_counter()
    await link.start()
    try:
        print(
            json.dumps({"start_s": round(time.perf_counter() - start, 2), "runner": config.decision.runner}), flush=True
        )
        bench = Bench(link, config.model.vocab_size)
        await bench.run(1, 32, 8)
        for batch in args.batches:
            step, host = await bench.decode_step(batch, args.steps, args.repeat)
            figures = {"ms_per_step": round(step * 1e3, 3), "tok_per_s": round(batch / step)}
            print(json.dumps({"decode_batch": batch} | figures | {"host_ms": round(host * 1e3, 3)}), flush=True)
        for batch, prompt in args.prompts:
            seconds = await bench.prefill(batch, prompt)
            figures = {"ms": round(seconds * 1e3, 2), "tok_per_s": round(batch * prompt / seconds)}
            print(json.dumps({"prompts": batch, "prefill_tokens": prompt} | figures), flush=True)
    finally:
        await link.shutdown()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _prompts(text: str) -> list[tuple[int, int]]:
    """(how many, tokens of each) from "256,64x1024"."""
    pairs = [part.rpartition("x") for part in text.split(",")]
    return [(int(count or 1), int(tokens)) for count, _, tokens in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_node_flags(parser)
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--prompts", type=_prompts, default=[(1, 256), (1, 1024)])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    try:
        asyncio.run(run(args))
    except PdserveError as exc:
        print(f"engine_steps.py: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
