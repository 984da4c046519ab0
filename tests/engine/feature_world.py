"""Random worlds of three nodes that draw the features of an engine together. Every token is compared.

    PYTHONPATH=.:tests/support python tests/engine/feature_world.py --minutes 60 [--seed 1]
    PYTHONPATH=.:tests/support python tests/engine/feature_world.py --seed 1 --world 7         one world again

Each node prefills and decodes. A request is drawn with a prompt that shares a prefix with others, a number of choices,
a way to its KV, and what happens to it meanwhile. Messages are neither lost nor reordered; transfers land block by
block, at random. Steps have modelled durations, and nothing runs in a thread, so a world follows from its seed.

A world aims at one cell of the table: kind of KV, feature, choices, drafts. The table counts what has happened. A cell
without a count is a failure, unless it is ``IMPOSSIBLE``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from typing import Any

from feature_requests import LONGEST, MOST_OUTPUT, NODES, Event, Request, RequestDraws, Task
from feature_sides import Side
from feature_table import KINDS, Cell, Feature, aim_of, missing, table
from slow_disk import SlowDisk
from slow_host_memory import SlowHostMemory
from toy import ToyRunner, num_tokens
from toy_node import BLOCK, DEPTHS

from pdserve.ipc.messages import (
    ChangeWeights,
    Connect,
    Pause,
    Resume,
    UseWeights,
)
from pdserve.kv.groups import KVHeads
from pdserve.kv.host_copies import HostRoom
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, StepPlan
from pdserve.weights.change import WeightChange

HEADS = (KVHeads(4, 1), KVHeads(1, 2), KVHeads(2, 1), KVHeads(2, 3))  # KV cache groups have these
TICK = 0.01  # seconds of a step, by the clock of leases
MOST_STEPS = 4000  # per phase
MOST_DRAFTS = 3
LEAST_BLOCKS = -(-(LONGEST + MOST_OUTPUT + 1) // BLOCK)


class FeatureWorld:
    """A world that aims at a cell. ``met`` takes what has happened."""

    def __init__(self, rng: random.Random, aim: Cell, counts: Counter[Cell]) -> None:
        self.now = 0.0
        self._rng = rng
        self._kind, self._feature, _, self._drafts = aim
        self._counts = counts
        self._draws = RequestDraws(rng, aim)
        self._step = 0
        self._slow = self._aims(Feature.REVOCATION) or rng.random() < 0.2
        options = self._draw_nodes()
        self.sides = [Side(self, index, options) for index in range(NODES)]
        for side in self.sides:
            side.node.obey(UseWeights("weights 0"))
        for side, other in itertools.permutations(self.sides, 2):
            side.node.obey(Connect(Peer("node", other.epoch, (other.node.kv,))))

    def epoch_of(self, node: int) -> str:
        return self.sides[node].epoch

    def memory_of(self, epoch: str) -> ToyRunner | None:
        return next(side.node.runner for side in self.sides if side.epoch == epoch)

    def met(self, request: Request, feature: Feature) -> None:
        self._counts[self._kind, feature, request.sampling.n, self._drafts] += 1
        request.met.add(feature)

    def run(self) -> list[Request]:
        """Serve requests until all have ended, and perhaps others with changed weights. Return all."""
        changes = self._aims(Feature.WEIGHTS) or self._rng.random() < 0.1
        for phase in range(1 + changes):
            if phase:
                self._change_weights()
            self._run_phase()
        for side in self.sides:
            side.assert_nothing_held()
        return self._draws.requests

    def close(self) -> None:
        for side in self.sides:
            side.node.close()

    # ------------------------------------------------------------ drawing

    def _aims(self, *features: Feature) -> bool:
        return self._feature in features

    def _draw_nodes(self) -> dict[str, Any]:
        """Return the options of all nodes."""
        rng = self._rng
        options = dict(KINDS[self._kind])
        depth, stages = rng.choice(DEPTHS)
        tight = self._aims(Feature.PREEMPTION, Feature.REVOCATION) or rng.random() < 0.3
        on_disk = self._aims(Feature.DISK) or rng.random() < 0.15
        in_host = on_disk or self._aims(Feature.HOST) or rng.random() < 0.15
        num_blocks = rng.randint(LEAST_BLOCKS, 20) if tight or in_host else rng.randint(24, 80)
        if "windows" in options:
            options["windows"] = windows = rng.choice(((None, 6), (None, None, 9), (5, 11), (None, None)))
            if not any(windows) or rng.random() < 0.5:
                options["heads"] = (*(rng.choice(HEADS) for _ in windows[1:]), HEADS[0])
            # Each windowed group adds 12 blocks, for the tokens of one step.
            num_blocks = num_blocks * max(1, windows.count(None)) + 12 * sum(map(bool, windows))
        if "state_slots" in options:
            options["state_slots"] = rng.choice((4, 6, 9, 20))
        if in_host:
            slots = rng.randint(3, 10) if "state_slots" in options else 0
            options |= {"host": HostRoom(rng.randint(14, 24) if on_disk else 60, slots), "host_memory": SlowHostMemory}
        if on_disk:
            options["disk"] = SlowDisk
        # Only runners without KV draft themselves, and so launch a step beside unverified drafts of theirs.
        planned = "state_slots" in options or rng.random() < 0.5
        return options | {
            "num_blocks": num_blocks,
            "depth": depth,
            "stages": stages,
            "max_num_seqs": rng.choice((3, 8)),
            "max_drafts": MOST_DRAFTS * self._drafts,
            "planned_drafts": planned,
            "kv_checksum": on_disk or rng.random() < 0.5,
            "layered": rng.random() < 0.3,
            "seconds": _seconds,
        }

    # ------------------------------------------------------------ events

    def _run_phase(self) -> None:
        self._step = 0
        requests = self._draws.draw()
        while self._step < MOST_STEPS:
            for request in requests:
                self._begin_or_go_on(request)
            for side in self.sides:
                side.step()
            for side in self.sides:
                self._deliver(side)
                side.transfer(self._rng, self._slow)
            self._step += 1
            self.now += TICK
            if all(self._has_ended(request) for request in requests) and all(side.at_rest for side in self.sides):
                break
        else:
            raise AssertionError(f"requests do not end: {[side.node.scheduler.status() for side in self.sides]}")
        for request in requests:
            self._check_served(request)

    def _begin_or_go_on(self, request: Request) -> None:
        """Let a request arrive, or let its next events happen."""
        if not request.rid:
            if request.arrival <= self._step:
                request.rid = self.sides[request.node].reads.submit(Task.of(request))
            return
        while request.todo and request.arrival + request.todo[0][0] <= self._step:
            _, event = request.todo.pop(0)
            side = self.sides[request.node]
            rid = request.rid
            if rid not in side.node.scheduler._live.requests:
                continue
            match event:
                case Event.PAUSE:
                    side.node.obey(Pause(rid))
                case Event.RESUME:
                    side.node.obey(Resume(rid))
                case Event.CANCEL:
                    request.cancelled = True
                    self.met(request, Feature.CANCEL)
                    side.reads.cancel(rid, self.now)
                case Event.MOVE:
                    self._move(request)

    def _move(self, request: Request) -> None:
        """Continue a request on another node, as a router does that knows its output so far."""
        rng = self._rng
        former = self.sides[request.node]
        rid = request.rid
        task = former.reads.jobs[rid]
        assert isinstance(task, Task)
        outputs = []
        for choice, whole in enumerate(task.whole):
            output = [*task.resume.get(choice, ()), *former.node.tokens[rid, choice]]
            if task.resume and choice not in task.resume:
                continue  # the request has ended before
            if len(output) < len(whole):
                outputs.append((choice, output))
        if not outputs:
            return
        begun = all(output for _, output in outputs)
        was = request.node
        request.node = rng.choice([index for index in range(NODES) if index != request.node])
        feature = rng.choice((Feature.PULL, Feature.SPLIT_PULL, Feature.HANDOFF, Feature.LEASE, Feature.HOST))
        request.way = self._draws.draw_way(request.node, feature, was)
        moved = Task.of(request, tuple(outputs) if begun else ())
        late = rng.random() < 0.5
        if not late:
            former.reads.cancel(rid, self.now)
        request.rid = self.sides[request.node].reads.submit(moved)
        if late:  # as where the new node pulls from the former one
            former.reads.cancel(rid, self.now)
        if begun:
            self.met(request, Feature.MIGRATION)

    def _change_weights(self) -> None:
        self._draws.weights += 1
        for side in self.sides:
            side.node.obey(ChangeWeights(WeightChange(patch="other values")))
            side.node.obey(UseWeights(f"weights {self._draws.weights}"))

    def _deliver(self, side: Side) -> None:
        """Deliver what a node has sent to its peers, and what these have sent to it."""
        reads = side.reads
        while reads.sent or any(call.events for call in reads.calls.values()):
            for sent in [reads.sent.pop(0) for _ in reads.sent[:]]:
                call = sent.call
                peer = next(side.prompts for side in self.sides if side.epoch == call.epoch)
                match sent.message:
                    case None:
                        peer.prefill(call)
                    case pb.ExtendRequest(ask=ask):
                        lease_ms = int(peer.table.extend(call.lease, self.now) * 1000)
                        reads.on(call, pb.PrefillEvent(extended=pb.Extended(ask=ask, lease_ms=lease_ms)), self.now)
                    case pb.ReleaseRequest():
                        released = pb.Released(stood=peer.release(call.lease))
                        reads.on(call, pb.PrefillEvent(released=released), self.now)
            for call in list(reads.calls.values()):
                while call.events:
                    reads.receive(call, call.events.popleft(), self.now)

    # ------------------------------------------------------------ ends

    def _has_ended(self, request: Request) -> bool:
        return bool(request.rid) and not request.todo

    def _check_served(self, request: Request) -> None:
        if request.weights and not request.cancelled:
            self.met(request, Feature.WEIGHTS)
        if request.cancelled:
            return
        side = self.sides[request.node]
        expected = side.reads.jobs[request.rid].expected
        outputs = [side.node.tokens[request.rid, choice] for choice in range(request.sampling.n)]
        assert outputs == expected, f"request {request.rid} is not served"


def _seconds(plan: StepPlan) -> float:
    """Return the modelled duration of a step: so short that nothing waits for its end."""
    return 1e-6 * (10 + num_tokens(plan))


def run_world(seed: int, number: int, counts: Counter[Cell], pairs: Counter[frozenset[Feature]]) -> None:
    """Run one world, and count what has happened: cells, and pairs of features that one request has met."""
    world = FeatureWorld(random.Random(f"{seed}/{number}"), aim_of(number), counts)
    try:
        for request in world.run():
            pairs.update(frozenset(pair) for pair in itertools.combinations(sorted(request.met), 2))
    finally:
        world.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, metavar="N", help="only this world")
    args = parser.parse_args()
    counts = Counter[Cell]()
    pairs = Counter[frozenset[Feature]]()
    until = time.monotonic() + 60 * args.minutes
    number = 0
    for number in itertools.count() if args.world is None else (args.world,):
        try:
            run_world(args.seed, number, counts, pairs)
        except Exception:
            print(f"--seed {args.seed} --world {number}, which aims at {aim_of(number)}, has failed", flush=True)
            raise
        if time.monotonic() > until:
            break
    print(table(counts, pairs))
    print(f"{number + 1} worlds; never drawn: {missing(counts) or 'none'}")
    return int(args.world is None and bool(missing(counts)))


if __name__ == "__main__":
    sys.exit(main())
