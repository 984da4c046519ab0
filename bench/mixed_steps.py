"""Time of steps that decode and compute a chunk of a prompt, beside the decode step alone and the chunk alone.

    python bench/mixed_steps.py MODEL [--decodes 8,32,128] [--chunks 256,512,1024,2048] [--contexts 0,8192]
        [--profile FILE] [any flag of a node]

It drives one runner, without engine and sockets, and launches each step while the last one is in flight, as the engine
does if the runner allows it. A row is the mean of ``--steps`` chunks that follow each other in a prompt, behind
``--context`` tokens that count as computed. Sequences that decode have ``--decode-context`` tokens. Times are in ms:

    excess = mixed - (chunk alone + decode step - decode step of one sequence)

The subtracted step is what both parts share: reading the weights, and the launch. ``--profile`` writes the operators of
the mixed steps by time, as torch's profiler counts them, for each row.

Give ``--max-num-seqs`` room for one more than the largest of ``--decodes``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from engine_steps import numbers

from pdserve.config.device import detect_devices
from pdserve.config.flags import add_node_flags, options_from
from pdserve.config.node_config import NodeConfig
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.protocols import ModelRunner, PendingStep
from pdserve.records import TOKEN_BYTES, NewSequence, SamplingParams, ScheduledSequence, StepPlan
from runner import build

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
WARM_UP = 3  # steps before the measured ones


class Steps:
    """Runs steps of one shape on a runner. Sequences share blocks: nothing reads their tokens."""

    def __init__(self, runner: ModelRunner, config: NodeConfig, decode_context: int) -> None:
        self._runner, self._config, self._decode_context = runner, config, decode_context
        self._next = 0

    def seconds(self, decodes: int, chunk: int, context: int, steps: int) -> float:
        """Return the mean time of a step."""
        total = WARM_UP + steps
        streams = [self._sequence(self._decode_context, 1, total) for _ in range(decodes)]
        prompts = [self._sequence(context, chunk * total)] if chunk else []
        new = tuple(streams + prompts)
        scheduled = tuple(ScheduledSequence(each.seq, 1, 1) for each in streams)
        scheduled += tuple(ScheduledSequence(each.seq, chunk, 0) for each in prompts)
        plans = (StepPlan(step, new=() if step else new, scheduled=scheduled) for step in range(total))
        times = list(self._times(plans))
        self._runner.launch(StepPlan(total, finished=tuple(each.seq for each in new))).result()
        return (times[-1] - times[WARM_UP - 1]) / steps

    def _times(self, plans: Iterator[StepPlan]) -> Iterator[float]:
        """Run steps one after the other; yield the time of each result."""
        pending: list[PendingStep] = []
        for plan in plans:
            pending.append(self._runner.launch(plan))
            if len(pending) == self._runner.max_in_flight:
                pending.pop(0).result()
                yield time.perf_counter()
        for step in pending:
            step.result()
            yield time.perf_counter()

    def _sequence(self, num_computed: int, known: int, generated: int = 0) -> NewSequence:
        """Return a sequence with KV of ``num_computed`` tokens, ``known`` tokens to compute, and some to generate."""
        layout, limit = self._runner.kv_layout, self._config.max_model_len
        length = num_computed + known
        if length + generated >= limit:
            raise RuntimeError(f"{length + generated} tokens do not fit into --max-model-len {limit}; raise it")
        seq, self._next = self._next, self._next + 1
        count = (length + generated) // layout.block_size + 1
        blocks = tuple((seq * count + at) % layout.num_blocks for at in range(count))
        return NewSequence(seq, bytes(length * TOKEN_BYTES), length, num_computed, blocks, GREEDY)


def measure(steps: Steps, args: argparse.Namespace) -> None:
    print(f"{'decodes':>8}{'chunk':>8}{'context':>9}{'decode':>10}{'alone':>10}{'mixed':>10}{'excess':>10}", flush=True)
    base = steps.seconds(1, 0, 0, args.steps)
    for decodes in args.decodes:
        decode = steps.seconds(decodes, 0, 0, args.steps)
        for context in args.contexts:
            for chunk in args.chunks:
                alone = steps.seconds(0, chunk, context, args.steps)
                mixed = steps.seconds(decodes, chunk, context, args.steps)
                row = (decode, alone, mixed, mixed - (alone + decode - base))
                print(f"{decodes:8}{chunk:8}{context:9}" + "".join(f"{each * 1e3:10.2f}" for each in row), flush=True)
                if args.profile:
                    profile(steps, args, (decodes, chunk, context))


def profile(steps: Steps, args: argparse.Namespace, shape: tuple[int, int, int]) -> None:
    """Append the operators of mixed steps to ``--profile``."""
    with torch.profiler.profile() as profiler:
        steps.seconds(*shape, args.steps)
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=key, row_limit=40)
    with args.profile.open("a") as file:
        file.write("{} decodes, a chunk of {} at context {}:\n{}\n".format(*shape, table))


def run(args: argparse.Namespace) -> None:
    devices = detect_devices(args.device, 1)
    config = resolve(options_from(args), devices[0])
    runner = build(config, lambda stage, fraction: None)
    try:
        print(f"{config.device.name}, runner {config.decision.runner}, attention {config.attention_backend}")
        measure(Steps(runner, config, args.decode_context), args)
    finally:
        runner.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_node_flags(parser)
    parser.add_argument("--decodes", type=numbers, default=[8, 32, 128], metavar="N,N")
    parser.add_argument("--chunks", type=numbers, default=[256, 512, 1024, 2048], metavar="N,N", help="tokens")
    parser.add_argument("--contexts", type=numbers, default=[0, 8192], metavar="N,N", help="tokens before the chunks")
    parser.add_argument("--decode-context", type=int, default=1024, help="tokens (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per row (default %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    try:
        run(args)
    except (PdserveError, RuntimeError) as exc:
        print(f"mixed_steps.py: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
