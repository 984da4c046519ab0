"""Time of decode steps with and without KV events: the recorder of one engine is switched on and off alternately.

    python bench/kv_event_cost.py MODEL [--batch 256] [--turn 16] [--rounds 8] [any flag of a node]

The engine runs in this process, with the step loop, scheduler and runner of a node. Another process reads what it sends
to its frontend, which would encode and publish the events. Turns are off, on, on, off: contexts grow, and the order
cancels that. Prompts differ in length, so that each step fills as many blocks as the next. The first steps of a turn
are left out where steps overlap: they were planned in the turn before. On a CPU they do not, so ``--turn 1`` compares
neighbours.

``p50_off_ms`` and ``p50_on_ms`` are medians of all steps. ``ratio`` is the median over rounds of on / off, and
``spread`` has its quartiles. ``cpu`` has these figures for the CPU time of the step loop's thread, for machines with
other load; on a CPU, give the node ``--threads 1``, or other threads compute a part of each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import socket
import statistics
import subprocess
import time
from array import array
from typing import Any, NamedTuple

from engine.channel import Channel
from engine.engine import Engine
from engine.executor.build import build_ranks
from engine.executor.rank import Ranks
from engine.executor.rank_processes import launch_rank
from engine.grammars.workers import GrammarWorkers
from engine.kv_cache.cache_recorder import CacheRecorder
from engine.kv_events.recorder import NetChanges
from engine.process import make_scheduler
from engine.scheduler.scheduler import Scheduler
from pdserve.config.device import detect_devices
from pdserve.config.node_options import add_node_flags, node_options_from
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError
from pdserve.ipc.messages import Configure, Mode, RankPlacement, Shutdown, Submit
from pdserve.sampling_params import SamplingParams

PROMPT = 32  # tokens of the shortest prompt; others have up to a block more, so that steps fill equal numbers of blocks
SKIPPED = 3  # steps of a turn, if it has more
TURNS = (False, True, True, False)  # turns of a round: whether events are on


class StepTime(NamedTuple):
    """Seconds between the ends of two steps, and CPU seconds of the step loop's thread."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> StepTime:
        return cls(time.perf_counter(), time.thread_time())


class AlternatingEngine(Engine):
    """Switches the recorder at each turn, and keeps the times between the ends of steps."""

    def __init__(
        self, scheduler: Scheduler, ranks: Ranks, channel: Channel, stages: int, warmup: int, turn: int
    ) -> None:
        super().__init__(scheduler, ranks, channel, stages)
        self.turns: list[list[StepTime]] = [[]]  # step times by turn; the first turn is the warm-up
        self.num_turns = 0
        self._report = scheduler.connector.report
        self._turn = turn
        self._left = warmup
        self._ended_at = StepTime.now()

    def step(self) -> None:
        super().step()
        now = StepTime.now()
        self.turns[-1].append(StepTime(now.wall - self._ended_at.wall, now.cpu - self._ended_at.cpu))
        self._ended_at = now
        self._left -= 1
        if self._left:
            return
        if len(self.turns) > self.num_turns:
            self.handle([Shutdown()])
            return
        is_on = TURNS[(len(self.turns) - 1) % len(TURNS)]
        self._report.record(NetChanges() if is_on else CacheRecorder())
        self.turns.append([])
        self._left = self._turn


def measure(args: argparse.Namespace) -> None:
    devices = detect_devices(args.device, args.pp * args.tp)
    config = resolve(node_options_from(args), devices[0])
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen(["cat"], stdin=ours.fileno(), stdout=subprocess.DEVNULL) as frontend:
        channel = Channel(theirs)
        ranks, _ = build_ranks(
            Configure(config, "", RankPlacement(devices)), channel, [launch_rank() for _ in devices[1:]]
        )
        grammars = GrammarWorkers(config.model_dir, config.model, channel.wake)
        scheduler = make_scheduler(config, ranks, grammars, "")
        block = config.kv_layout.block_size
        num_turns = args.rounds * len(TURNS)
        warmup = 3 * block
        engine = AlternatingEngine(scheduler, ranks, channel, config.parallel.pp, warmup, args.turn)
        engine.num_turns = num_turns
        output = (
            warmup + num_turns * args.turn + 4 * block
        )  # more than all turns need: prompts of several steps come first
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        rng = random.Random(0)
        if args.batch > config.max_num_seqs:
            raise ConfigError(
                f"batch {args.batch} is larger than --max-num-seqs {config.max_num_seqs}; give a larger one"
            )
        for number in range(args.batch):
            prompt = rng.choices(range(config.model.vocab_size), k=PROMPT + number % block)
            engine.handle([Submit(number, array("I", prompt).tobytes(), sampling, Mode.LOCAL)])
        while (status := scheduler.status()).waiting or status.backlog:
            Engine.step(engine)
        gc.collect()
        gc.freeze()  # as a node does
        engine.run()
        ranks.close()
        channel.close()
        frontend.terminate()
    report(config.decision.runner, args.batch, engine.turns[1:])


def report(runner: str, batch: int, turns: list[list[StepTime]]) -> None:
    wall, cpu = (
        [[getattr(step, name) for step in turn[min(SKIPPED, len(turn) - 1) :]] for turn in turns]
        for name in StepTime._fields
    )
    print(json.dumps({"runner": runner, "batch": batch, **compare(wall), "cpu": compare(cpu)}))


def compare(turns: list[list[float]]) -> dict[str, Any]:
    """Return the medians of steps without and with events, in milliseconds, and their ratio by rounds."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    ratios: list[float] = []
    for first in range(0, len(turns), len(TURNS)):
        of_round: dict[bool, list[float]] = {False: [], True: []}
        for is_on, turn in zip(TURNS, turns[first : first + len(TURNS)], strict=True):
            of_round[is_on] += turn
        ratios.append(statistics.median(of_round[True]) / statistics.median(of_round[False]))
        for is_on, seconds in of_round.items():
            steps[is_on] += seconds
    low, ratio, high = statistics.quantiles(ratios, n=4)
    off, on = (round(1e3 * statistics.median(steps[is_on]), 4) for is_on in (False, True))
    return {"p50_off_ms": off, "p50_on_ms": on, "ratio": round(ratio, 4), "spread": [round(low, 4), round(high, 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turn", type=int, default=16, metavar="N", help="steps of a turn (default 16)")
    parser.add_argument("--rounds", type=int, default=8)
    add_node_flags(parser)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
