"""Time that decodes and prompts cost each other in a step of a runner, without scheduler, messages and connector.

    python bench/make_checkpoint.py /tmp/l --shape llama-8b --config-only
    python bench/mixed_steps.py /tmp/l --load-format dummy --device cuda --decodes 0,16,100 --chunks 0,512,1400,2048
    python bench/mixed_steps.py /tmp/l --load-format dummy --device cuda --decodes 100 --chunks 1400 --profile /tmp/p

Flags after the model are the node's. A row is a step of so many decodes, each behind ``--context`` tokens, and of a
chunk of a prompt with as many tokens before it. ``ms`` is the median of ``--repeat`` steps that follow each other on
the device, ``launch`` the time of the host until the step is launched. ``lost`` is the time of the step less that
of the chunk alone. A node paces prompts by it (``pdserve/step_pacing.py``): in steps of S
they take S / (S - lost) of their time alone.

``--profile DIR`` writes a table of kernels per step, the time in which the device is idle, and a trace.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

import runner
from pdserve.config.device import detect_devices
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import add_node_flags, node_options_from
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError
from pdserve.flags.value_types import positive_int
from pdserve.host.process import run_command
from pdserve.protocols import ModelRunner, PendingStep
from pdserve.records import TOKEN_BYTES, NewSequence, ScheduledSequence, StepPlan
from pdserve.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
WARM = 3  # steps before those that are measured
PROFILED = 5  # steps in a profile
MOST_KERNELS = 25  # rows of the table of kernels


class Row(NamedTuple):
    """A measured mixture. Times are in ms."""

    decodes: int
    chunk: int
    step: float
    launch: float


class Mixture:
    """Sequences that decode, and prompts whose first ``context`` tokens count as computed.

    Their blocks overlap: nothing reads the tokens. So any mixture fits into any cache, and reads as many bytes.
    """

    def __init__(self, model_runner: ModelRunner, decodes: int, chunk: int, context: int, most_steps: int) -> None:
        self._runner = model_runner
        self._most_steps = most_steps
        self._chunk = chunk
        self._context = context
        self._seqs = count(1)
        self._steps = count(1)
        self._prompt: int | None = None
        self._pending: PendingStep | None = None
        new = [self._sequence(context + 1, context, index) for index in range(decodes)]
        self._decodes = tuple(ScheduledSequence.decode(sequence.seq) for sequence in new)
        self._launch(StepPlan(next(self._steps), new=tuple(new), scheduled=self._decodes, num_decodes=decodes))

    def step(self) -> float:
        """Launch the next step; return the seconds of the host. Each chunk is of another prompt."""
        finished = () if self._prompt is None else (self._prompt,)
        self._prompt = None
        new: tuple[NewSequence, ...] = ()
        chunks: tuple[ScheduledSequence, ...] = ()
        if self._chunk:
            prompt = self._sequence(self._context + self._chunk, self._context, 0)
            self._prompt = prompt.seq
            new = (prompt,)
            chunks = (ScheduledSequence(prompt.seq, self._chunk, 1),)
        plan = StepPlan(
            next(self._steps),
            finished=finished,
            new=new,
            scheduled=(*self._decodes, *chunks),
            num_decodes=len(self._decodes),
        )
        return self._launch(plan)

    def close(self) -> None:
        seqs = [item.seq for item in self._decodes]
        finished = tuple(seqs) if self._prompt is None else (*seqs, self._prompt)
        self.wait()
        self._runner.launch(StepPlan(next(self._steps), finished=finished)).result()

    def _launch(self, plan: StepPlan) -> float:
        """Launch a step behind the one in flight, as an engine does, and wait for the latter."""
        start = time.perf_counter()
        launched = self._runner.launch(plan)
        seconds = time.perf_counter() - start
        self.wait()
        self._pending = launched
        return seconds

    def wait(self) -> None:
        """Wait for the step in flight."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _sequence(self, length: int, num_computed: int, offset: int) -> NewSequence:
        layout = self._runner.kv_layout
        num_blocks = ((length + self._most_steps) // layout.block_size + 1) * layout.groups.num_groups
        blocks = tuple((offset * num_blocks + at) % layout.num_blocks for at in range(num_blocks))
        return NewSequence(next(self._seqs), bytes(length * TOKEN_BYTES), length, num_computed, blocks, SAMPLING)


def measure(model_runner: ModelRunner, decodes: int, chunk: int, args: argparse.Namespace) -> Row:
    mixture = Mixture(model_runner, decodes, chunk, args.context, WARM + args.repeat)
    for _ in range(WARM):
        mixture.step()
    steps = []
    launches = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        launches.append(mixture.step())
        steps.append(time.perf_counter() - start)
    mixture.close()
    return Row(decodes, chunk, 1e3 * statistics.median(steps), 1e3 * statistics.median(launches))


def profile(model_runner: ModelRunner, decodes: int, chunk: int, args: argparse.Namespace) -> str:
    """Return a table of the kernels of a step. Write the trace of some steps to ``--profile``."""
    mixture = Mixture(model_runner, decodes, chunk, args.context, WARM + PROFILED)
    for _ in range(WARM):
        mixture.step()
    is_cuda = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if is_cuda else [])]
    start = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as profiled:
        for _ in range(PROFILED):
            mixture.step()
        mixture.wait()
    seconds = time.perf_counter() - start
    mixture.close()
    args.profile.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(args.profile / f"{decodes}-{chunk}.json"))
    averages = profiled.key_averages()
    kernels = sorted(
        ((item.self_device_time_total, item.count, item.key) for item in averages if item.self_device_time_total),
        reverse=True,
    )
    busy = sum(micros for micros, _, _ in kernels) / PROFILED / 1e3
    idle = 1e3 * seconds / PROFILED - busy
    lines = [f"{decodes} decodes, chunk of {chunk}: {busy:.2f} ms of kernels per step, {idle:.2f} ms idle (profiled)"]
    for micros, calls, name in kernels[:MOST_KERNELS]:
        lines.append(f"  {micros / PROFILED / 1e3:8.3f} ms  {calls / PROFILED:7.1f} ×  {name[:110]}")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> Iterator[str]:
    alone = {row.chunk: row.step for row in rows if not row.decodes}
    yield "| decodes | chunk | ms | launch | lost |"
    yield "|---|---|---|---|---|"
    for row in rows:
        lost = f"{row.step - alone[row.chunk]:.2f}" if row.decodes and row.chunk and row.chunk in alone else ""
        yield f"| {row.decodes} | {row.chunk} | {row.step:.2f} | {row.launch:.2f} | {lost} |"


def numbers(text: str) -> list[int]:
    """Parse whole numbers of at least 0. Raises ArgumentTypeError."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text} is invalid; give whole numbers of at least 0, as in 0,16,100")
    return values


def check(args: argparse.Namespace, config: NodeConfig) -> None:
    """Raise ConfigError for a mixture that a step does not hold."""
    decodes = max(args.decodes)
    tokens = decodes + max(args.chunks)
    if decodes + 1 > config.max_num_seqs or tokens > config.max_batch_tokens:
        raise ConfigError(
            f"{decodes} decodes and a chunk make {decodes + 1} sequences and {tokens} tokens; the limits are "
            f"{config.max_num_seqs} and {config.max_batch_tokens}: lower --decodes or --chunks"
        )
    length = args.context + max(args.chunks) + args.repeat + WARM + PROFILED + config.kv_layout.block_size
    if length > config.max_model_len:
        raise ConfigError(f"sequences grow to {length} tokens, the limit is {config.max_model_len}; lower --context")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_node_flags(parser)
    parser.add_argument("--decodes", type=numbers, default=[0, 16, 100], metavar="N,…", help="sequences that decode")
    parser.add_argument(
        "--chunks", type=numbers, default=[0, 512, 1400, 2048], metavar="N,…", help="tokens of a prompt"
    )
    parser.add_argument("--context", type=positive_int, default=2000, metavar="N", help="tokens before each")
    parser.add_argument("--repeat", type=positive_int, default=20, metavar="N", help="measured steps of each row")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write kernels and a trace of each mixture")
    args = parser.parse_args(argv)
    options = node_options_from(args)
    config = resolve(options, detect_devices(options.device, 1)[0])
    check(args, config)
    model_runner = runner.build(config, lambda stage, fraction: None)
    mixtures = [(decodes, chunk) for chunk in args.chunks for decodes in args.decodes if decodes or chunk]
    print("\n".join(table([measure(model_runner, *mixture, args) for mixture in mixtures])))
    if args.profile is not None:
        for mixture in mixtures:
            print(profile(model_runner, *mixture, args))
    model_runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
