"""World with the local connector, and requests whose faults are scripted. Messages are neither lost nor reordered."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from lease_sides import Call, DecodeSide, Job, PrefillSide, StreamEvent
from lease_world import World
from slow_connector import Transfer
from toy_node import Node

from node.reading.handoff import Event
from pdserve.ipc.messages import Pause, ReadChecked, ReadEnded, Resume, StartRead
from pdserve.pb import pdserve_pb2 as pb

STAGES = ("reserved", "part", "part reading", "part read", "leased", "reading", "read")
TICK = 0.01  # seconds per step of an engine; some requests extend their leases


@dataclass(frozen=True)
class ScriptedJob(Job):
    """A request to D. ``what`` happens to it ``when``: at a stage, or a number of steps after its arrival.

    "cancel" and "give up" come from D; "pause": its client stops reading, and reads on at once; "break": its reads fail
    from then on; "expire": P's lease ends. With digests: "corrupt": later digests are announced wrong; "overwrite": P's
    blocks change after their announcement. "delay reads", at no stage: D reads when P has nothing left to compute.
    What is pulled from P is served there from the beginning.
    """

    arrival: int = 0
    what: str = ""
    when: str | int = ""


class ScriptedDecodeSide(DecodeSide):
    """Applies the faults of requests at their stages."""

    def __init__(self, node: Node, world: ScriptedWorld) -> None:
        super().__init__(node)
        self._world = world
        self._delayed: list[tuple[Call, StartRead]] = []

    def step(self, now: float) -> None:
        if self._world.p.node.engine.idle:
            for call, order in self._delayed:
                super().read(call, order)
            self._delayed.clear()
        super().step(now)

    def start(self, rid: int, cached: int, now: float) -> None:
        super().start(rid, cached, now)
        self._world.reached(rid, "reserved")

    def receive(self, call: Call, event: StreamEvent, now: float) -> None:
        if not isinstance(event, pb.PrefillEvent) or not event.HasField("kv_ready"):
            super().receive(call, event, now)
            return
        part = "" if event.kv_ready.num_tokens == len(call.job.handoff_tokens) else "part "
        self._world.reached(call.rid, part.strip() or "leased")
        super().receive(call, event, now)
        self._world.reached(call.rid, part + "reading")

    def on(self, call: Call, event: Event, now: float) -> None:
        if isinstance(event, ReadEnded):
            self._world.check_read(event)
            if call.handoff.announced < len(call.job.handoff_tokens):
                self._world.reached(call.rid, "part read")
            elif not call.num_reads:
                self._world.reached(call.rid, "read")
        if isinstance(event, ReadChecked):
            self._world.check_digests(event)
        super().on(call, event, now)

    def read(self, call: Call, order: StartRead) -> None:
        assert isinstance(call.job, ScriptedJob)
        if call.job.what == "delay reads":
            self._delayed.append((call, order))
        else:
            super().read(call, self._world.sabotaged(order))


class ScriptedWorld(World):
    """Requests are numbered from 1, in the order of their arrival."""

    def __init__(
        self,
        depth: tuple[int, int],
        blocks: tuple[int, int],
        jobs: list[ScriptedJob],
        *,
        checksum: bool = False,
        drafts: tuple[int, int] = (0, 0),
        planned_drafts: bool = False,
        state_slots: tuple[int, int] = (0, 0),
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        """``blocks`` are the KV blocks of P and D, ``drafts`` the drafts of a decode; ``checksum`` turns digests on.

        ``state_slots`` are the recurrent-state slots of P and D: both 0 for a model without recurrent layers.
        """
        self._state_slots = state_slots
        self._blocks = blocks
        self._drafts = drafts
        self._planned_drafts = planned_drafts
        self._windows = windows
        self._checksum = checksum
        self._arrivals = sorted(jobs, key=lambda job: job.arrival)
        self._broken: set[int] = set()
        self._corrupt: set[int] = set()  # including reads after the end of a lease
        self._num_steps = 0
        super().__init__(depth, 1.0)
        for job in jobs:
            if job.pull:
                self.p.serve(job)

    def make_p(self) -> PrefillSide:
        return PrefillSide(self._make(0))

    def make_d(self) -> DecodeSide:
        return ScriptedDecodeSide(self._make(1), self)

    def _make(self, side: int) -> Node:
        blocks = self._blocks[side]
        drafts = self._drafts[side]
        return Node(
            blocks,
            *self.depth,
            kv_checksum=self._checksum,
            max_drafts=drafts,
            planned_drafts=self._planned_drafts,
            state_slots=self._state_slots[side],
            windows=self._windows,
        )

    @property
    def transfers(self) -> dict[int, Transfer]:
        return {}  # the local connector's own

    def run(self) -> None:
        """Run all requests to their end. Then all tokens are right, and no lease has to expire for free blocks."""
        for _ in range(3000):
            self._step()
            if not self._arrivals and self.at_rest:
                break
        else:
            raise AssertionError("requests do not end")
        self.d.assert_served()
        self.p.assert_served()
        self.d.node.assert_all_free()
        self.p.node.assert_all_free()

    def reached(self, rid: int, stage: str | int) -> None:
        """Apply the request's fault if it is due at this stage."""
        job = self.d.jobs[rid]
        assert isinstance(job, ScriptedJob)
        if job.when != stage:
            return
        call = self.d.calls.get(rid)
        if job.what == "cancel":
            self.cancel(rid)
        elif job.what == "pause":
            self.d.node.obey(Pause(rid))
            self.d.node.obey(Resume(rid))
        elif job.what == "break":
            self._broken.add(rid)
        elif job.what in ("corrupt", "overwrite"):
            self._corrupt.add(rid)
        elif call is not None and job.what == "expire":
            self._corrupt.add(rid)
            self.p.expire_lease(call, self.now)
        elif call is not None:
            self.d.give_up(call, self.d_now)

    def sabotaged(self, order: StartRead) -> StartRead:
        """Return the read with the request's fault."""
        job = self.d.jobs[order.rid]
        assert isinstance(job, ScriptedJob)
        if order.rid in self._broken:
            return msgspec.structs.replace(order, epoch="unknown")
        if order.rid in self._corrupt and job.what == "corrupt":
            return msgspec.structs.replace(order, digests=(order.digests[0] ^ 1, *order.digests[1:]))
        if order.rid in self._corrupt and job.what == "overwrite":
            self.p.node.runner.overwrite(order.remote_blocks[-1])
        return order

    def check_read(self, ended: ReadEnded) -> None:
        """Assert that only reads with a fault fail."""
        assert ended.rid in self._broken or not ended.result.error, ended

    def check_digests(self, checked: ReadChecked) -> None:
        """Assert that only requests with a fault read corrupt blocks."""
        assert checked.rid in self._corrupt or not checked.num_corrupt, checked

    def _step(self) -> None:
        while self._arrivals and self._arrivals[0].arrival <= self._num_steps:
            self.d.submit(self._arrivals.pop(0))
        for rid, job in list(self.d.jobs.items()):
            assert isinstance(job, ScriptedJob)
            if isinstance(job.when, int) and job.arrival + job.when == self._num_steps:
                self.reached(rid, job.when)
        self._num_steps += 1
        if self.d.node.engine.idle and self.p.node.engine.idle:
            time.sleep(0.0005)  # the connector's thread may be copying: no time passes in this world
        else:
            self.wait(TICK)
        self.step()
        self.deliver_all()
        self.tick_d()

    def _check_announced_blocks(self) -> None:
        if not self._checksum:  # then a fault may overwrite P's blocks
            super()._check_announced_blocks()
