"""A node of both roles in a random world: it serves requests, prompts of peers and pulls, and tells what they meet."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from feature_requests import Request, Task
from feature_table import Feature
from lease_sides import Call, DecodeSide, Job, PrefillSide
from slow_connector import SlowConnector
from slow_disk import SlowDisk
from slow_host_memory import SlowHostMemory
from toy import ToyRunner
from toy_node import BLOCK, Node

from engine.recurrent.state_slots import StateSlots
from engine.sequence import Sequence
from node.leasing.leases import Lease, LeaseId
from pdserve.ipc.cache_changes import Medium
from pdserve.ipc.messages import ComputeBeside, KVConfirmed, Mode, Resume, ToEngine


class Surroundings(Protocol):
    """A node's view of its world."""

    now: float

    def epoch_of(self, node: int) -> str: ...

    def memory_of(self, epoch: str) -> ToyRunner | None: ...

    def met(self, request: Request, feature: Feature) -> None: ...


class WatchedNode(Node):
    """Reports the commands that take effect."""

    watch: Callable[[ToEngine], None]

    def obey(self, message: ToEngine) -> None:
        if self._has_effect(message):
            self.watch(message)
        super().obey(message)

    def _has_effect(self, message: ToEngine) -> bool:
        live = self.scheduler._live
        match message:
            case KVConfirmed(rid=rid) | ComputeBeside(rid=rid):
                return rid in live.loading
            case Resume(rid=rid):
                return rid in live.requests and live.requests[rid].paused
        return False


class Prompts(PrefillSide):
    """Prompts of peers. For some of them this node pulls first, as ``Reads`` does for requests."""

    has_both_roles = True
    reads: Reads

    def prefill(self, call: Call) -> None:
        job = call.job
        rid = call.stream
        assert isinstance(job, Task)
        if job.pull or job.source < 0:
            super().prefill(call)
            return
        self.table.accept(Lease(call.lease))
        self._calls[rid] = call
        self._leases[rid] = call.lease
        self._samples[rid] = ()
        self._unleased[rid] = job
        task = Task(
            job.handoff_tokens,
            job.prefill_sampling,
            Mode.PULL_AND_LEASE,
            pull=True,
            beside=job.beside,
            owner=job.owner,
            peer=job.source,
        )
        self.reads.jobs[rid] = task
        self.node.submit(rid, task.prompt, task.sampling, task.mode, call.skip, decode_ahead=job.ahead)

    def owner(self, rid: int) -> Request | None:
        call = self._calls.get(rid)
        return call.job.owner if call is not None and isinstance(call.job, Task) else None

    def _free(self, lease: LeaseId) -> None:
        super()._free(lease)
        self.reads.abandon(lease.stream)


class Reads(DecodeSide):
    """Requests of this node, and pulls for prompts of peers."""

    def __init__(self, node: Node, world: Surroundings) -> None:
        super().__init__(node)
        self._world = world

    @property
    def read_here(self) -> set[int]:
        return set()

    def epoch_of(self, job: Job) -> str:
        assert isinstance(job, Task)
        return self._world.epoch_of(job.peer)

    def abandon(self, rid: int) -> None:
        """The prompt of a peer has ended: end its pull."""
        if (call := self.calls.get(rid)) is not None:
            self._act(call, call.handoff.give_up(), self._world.now)
        self.jobs.pop(rid, None)


class Side:
    """A node with both roles."""

    def __init__(self, world: Surroundings, index: int, options: dict[str, Any]) -> None:
        self._world = world
        self._split: set[int] = set()  # rids whose first blocks are computed beside a pull
        self._pulled: set[int] = set()  # rids
        self.connector = SlowConnector(f"node-{index}", world.memory_of)
        self.node = WatchedNode(**options, connector=self.connector)
        self.node.watch = self._watch
        self.connector.runner = self.node.runner
        self.prompts = Prompts(self.node)
        self.reads = self.prompts.reads = Reads(self.node, world)
        states = self.node.scheduler.states
        if isinstance(states, StateSlots):  # else there is no snapshot amid so short an answer
            states._distance = 3 * BLOCK
            states._decode_distance = 2 * BLOCK
        room = self.node.scheduler.room
        preempt = self.node.scheduler.room.preempt

        def watched(sequence: Sequence | None) -> None:
            if sequence is not None and sequence.table.blocks:
                self._met(sequence.rid, Feature.PREEMPTION)
            preempt(sequence)

        room.preempt = watched  # type: ignore[method-assign]

    @property
    def epoch(self) -> str:
        return self.node.epoch

    def step(self) -> None:
        now = self._world.now
        batch = self.node.step()
        for fetched in batch.fetched:
            if fetched.num_tokens:
                self._met(fetched.rid, Feature.HOST if fetched.medium is Medium.HOST else Feature.DISK)
        for leased in batch.leased:
            if leased.last and leased.rid in self._pulled:
                self._met(leased.rid, Feature.LEASE)
        self.prompts.take(batch, now)
        for refused in batch.refused:
            self.reads.abandon(refused.rid)
        for rid in list(self.prompts.to_revoke):
            owner = self.prompts.owner(rid)
            self.prompts.revoke(rid)
            if owner is not None and rid in self.prompts.revoked:
                self._world.met(owner, Feature.REVOCATION)
        self.reads.take(batch, now)
        self.reads.tick(now)
        self.prompts.expire(now)

    def transfer(self, rng: random.Random, slow: bool) -> None:
        """Let some transfers go on; reads from peers may be slow."""
        for read_id in list(self.connector.transfers):
            for _ in range(rng.choice((0, 0, 0, 1) if slow else (0, 1, 1, 3, 50))):
                if read_id in self.connector.transfers:
                    self.connector.land(read_id)
        if isinstance(memory := self.node.host_memory, SlowHostMemory):
            for copy_id in list(memory.copies):
                for _ in range(rng.choice((0, 1, 3, 50))):
                    if copy_id in memory.copies:
                        memory.land(copy_id)
        if isinstance(disk := self.node.disk, SlowDisk):
            for order_id in list(disk.orders):
                if rng.random() < 0.5:
                    disk.land(order_id)

    @property
    def at_rest(self) -> bool:
        status = self.node.scheduler.status()
        memory = self.node.host_memory
        disk = self.node.disk
        if status.free != status.total or status.waiting or status.reading or status.running or status.paused:
            return False
        copying = isinstance(memory, SlowHostMemory) and (memory.copies or self.node.scheduler.connector.tiers.copying)
        writing = isinstance(disk, SlowDisk) and disk.orders
        return self.node.engine.idle and not (copying or writing or self.connector.transfers or self.reads.calls)

    def assert_nothing_held(self) -> None:
        self.node.assert_all_free()
        assert not len(self.prompts.table), "a lease has not ended"
        assert not self.node.peers._leases, "the engine keeps a lease"
        totals = self.node.scheduler.totals
        assert not totals.host_kv_corrupt_blocks, "a block in host memory was not what its digest says"
        assert not totals.disk_kv_corrupt_blocks, "a block on disk was not what its digest says"

    def _met(self, rid: int, feature: Feature) -> None:
        job = self.reads.jobs.get(rid)
        owner = job.owner if isinstance(job, Task) else self.prompts.owner(rid)
        if owner is not None:
            self._world.met(owner, feature)

    def _watch(self, command: ToEngine) -> None:
        match command:
            case Resume(rid=rid):
                self._met(rid, Feature.PAUSE)
            case ComputeBeside(rid=rid):
                self._split.add(rid)
            case KVConfirmed(rid=rid, num_tokens=num_tokens):
                if not self.reads.jobs[rid].pull:
                    self._met(rid, Feature.HANDOFF)
                elif num_tokens:
                    self._pulled.add(rid)
                    self._met(rid, Feature.SPLIT_PULL if rid in self._split else Feature.PULL)
