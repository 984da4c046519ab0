"""Merges the outputs of a node's ranks: a step, read, copy or connection is complete once every rank has reported it.

    rank 0   step 7 ─────────── read 3 ──────────────┐
    rank 1   step 7 ──────────────────── read 3 ─────┤ ReadResult of read 3, with the next output that is taken
    rank 2   ──────── step 7 ────── read 3 ──────────┘
                            └ output of step 7 may be taken

Pure bookkeeping. Each order expects one report of every rank; repeated reports, and reports of unknown or withdrawn
orders, are ignored. Reports are never altered.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import msgspec

from pdserve.adapters.adapter import AdapterLoaded
from pdserve.config.parallel import ParallelConfig
from pdserve.kv.disk_transfers import DiskEvent, DiskLate, DiskListing, DiskOrder, DiskResult
from pdserve.kv.host_copies import CopyResult, HostRoom
from pdserve.kv.layout import KVShare
from pdserve.kv.transports import Connected, combine
from pdserve.records import (
    EMPTY_CONNECTOR_OUTPUT,
    DigestOrder,
    KVConnectorOrders,
    KVConnectorOutput,
    ModelRunnerOutput,
    ReadResult,
    StepOutput,
)

ResultT = TypeVar("ResultT", ReadResult, CopyResult)


class OutputAggregator:
    """Merges the outputs of one node. ``shares`` are the parts of the KV that the ranks hold."""

    def __init__(self, parallel: ParallelConfig, shares: tuple[KVShare, ...]) -> None:
        self._parallel = parallel
        self._ranks = range(parallel.num_ranks)
        self._sampling_rank = (parallel.pp - 1) * parallel.tp
        self._digesting = tuple(rank for rank in self._ranks if shares[rank] not in shares[:rank])
        self._steps: dict[int, dict[int, StepOutput]] = {}  # by step, then rank
        self._digests_of_steps: dict[int, tuple[DigestOrder, ...]] = {}  # by step
        self._reads: dict[int, dict[int, ReadResult]] = {}  # by read, then rank
        self._copies: dict[int, dict[int, CopyResult]] = {}  # by copy, then rank
        self._disk: dict[int, dict[int, DiskResult]] = {}  # by transfer, then rank
        self._late: set[int] = set()  # transfers that have not ended
        self._rooms: dict[int, HostRoom] = {}  # by rank
        self._peers: dict[str, dict[int, Connected]] = {}  # by epoch, then rank
        self._adapters: dict[str, dict[int, AdapterLoaded]] = {}  # by digest, then rank
        self._digests: dict[int, tuple[DigestOrder, dict[int, tuple[int, ...]]]] = {}  # by id of the order, then rank
        self._rules: dict[str, Callable[[int, Any], None]] = {  # by field of KVConnectorOutput, for each item
            "finished_recving": self._add_read,
            "connected": self._add_connected,
            "failed_peers": self._add_failed_peer,
            "digested": self._add_digests,
            "copied": self._add_copy,
            "host_room": self._add_host_room,
            "disk": self._add_disk_event,
            "adapters": self._add_adapter,
        }
        self._merged: dict[str, list[Any]] = {field: [] for field in self._rules}  # complete, not taken yet

    # ------------------------------------------------------------ orders

    def expect_step(self, step: int, digests: tuple[DigestOrder, ...] = ()) -> None:
        """Expect a report of every rank for a step, which computes these digests."""
        self._steps[step] = {}
        self._digests_of_steps[step] = digests

    def expect_transfers(self, orders: KVConnectorOrders) -> None:
        """Expect a report of every rank for each read, copy and connection."""
        for read in orders.reads:
            self._reads[read.read_id] = {}
        for copy in orders.copies:
            self._copies[copy.copy_id] = {}
        for disk_order in orders.disk:
            if isinstance(disk_order, DiskOrder):
                self._disk[disk_order.order_id] = {}
        for adapter in orders.adapters:
            self._adapters[adapter.digest] = {}
        for number, order in orders.digests:
            self._digests[number] = (order, {})
        for epoch in orders.disconnect:
            self._peers.pop(epoch, None)
        for peer in orders.connect:
            self._peers[peer.epoch] = {}

    # ------------------------------------------------------------ reports

    def add(self, rank: int, output: ModelRunnerOutput) -> None:
        """Add a rank's output of a step, or of NO_STEP with connector events alone."""
        reports = self._steps.get(output.step.step)
        if reports is not None:
            reports.setdefault(rank, output.step)
        if output.connector:
            for field in output.connector.__struct_fields__:
                merge = self._rules[field]
                for item in getattr(output.connector, field):
                    merge(rank, item)

    def _add_read(self, rank: int, result: ReadResult) -> None:
        self._add_result(self._reads, result.read_id, rank, result, "finished_recving")

    def _add_copy(self, rank: int, result: CopyResult) -> None:
        self._add_result(self._copies, result.copy_id, rank, result, "copied")

    def _add_result(
        self, pending: dict[int, dict[int, ResultT]], number: int, rank: int, result: ResultT, field: str
    ) -> None:
        results = pending.get(number)
        if results is None or rank in results:
            return
        results[rank] = result
        if len(results) == len(self._ranks):
            del pending[number]
            self._merged[field].append(self._merge_results(results))

    def _add_disk_event(self, rank: int, event: DiskEvent) -> None:
        match event:
            case DiskResult():
                self._add_disk_result(rank, event)
            case DiskLate(number):
                if number in self._disk and number not in self._late:
                    self._late.add(number)
                    self._merged["disk"].append(event)
            case DiskListing():
                self._merged["disk"].append(event)

    def _add_disk_result(self, rank: int, result: DiskResult) -> None:
        """Report the worst outcome of each block: it is of use only if every rank has its part.

        Operations that fail on several ranks failed once.
        """
        results = self._disk.get(result.order_id)
        if results is None or rank in results:
            return
        results[rank] = result
        if len(results) < len(self._ranks):
            return
        parts = self._disk.pop(result.order_id).values()
        self._late.discard(result.order_id)
        merged = DiskResult(
            result.order_id,
            outcomes=tuple(map(max, zip(*(part.outcomes for part in parts), strict=True))),
            num_bytes=sum(part.num_bytes for part in parts),
            seconds=max(part.seconds for part in parts),
            num_failed=max(part.num_failed for part in parts),
            num_evicted=sum(part.num_evicted for part in parts),
        )
        self._merged["disk"].append(merged)

    def _merge_results(self, results: dict[int, ResultT]) -> ResultT:
        """Add up sizes; take the longest time and the first error."""
        parts = results.values()
        errors = (f"{self._parallel.position(rank)}: {part.error}" for rank, part in results.items() if part.error)
        sums = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("num_bytes", "num_descriptors")
            if name in next(iter(parts)).__struct_fields__
        }
        return msgspec.structs.replace(
            next(iter(parts)), error=next(errors, ""), seconds=max(part.seconds for part in parts), **sums
        )

    def _add_connected(self, rank: int, connection: Connected) -> None:
        ranks = self._peers.get(connection.epoch)
        if ranks is None or rank in ranks:
            return
        ranks[rank] = connection
        if len(ranks) == len(self._ranks):
            self._merged["connected"].append(combine([ranks[rank] for rank in self._ranks]))

    def _add_digests(self, rank: int, numbered: tuple[int, tuple[int, ...]]) -> None:
        number, digests = numbered
        if number not in self._digests:
            return
        order, ranks = self._digests[number]
        ranks.setdefault(rank, digests)
        if len(ranks) == len(self._ranks):
            del self._digests[number]
            self._merged["digested"].append((number, self._sum_digests(order, ranks)))

    def _add_host_room(self, rank: int, room: HostRoom) -> None:
        """Report the memory that every rank has."""
        self._rooms[rank] = room
        if len(self._rooms) == len(self._ranks):
            num_blocks = min(room.num_blocks for room in self._rooms.values())
            num_slots = min(room.num_slots for room in self._rooms.values())
            self._merged["host_room"] = [HostRoom(num_blocks, num_slots)]

    def _add_adapter(self, rank: int, loaded: AdapterLoaded) -> None:
        """Report an adapter once every rank has loaded it, or has failed to; with the first rank's error."""
        ranks = self._adapters.get(loaded.digest)
        if ranks is None or rank in ranks:
            return
        ranks[rank] = loaded
        if len(ranks) < len(self._ranks):
            return
        del self._adapters[loaded.digest]
        errors = (f"{self._parallel.position(rank)}: {ranks[rank].error}" for rank in self._ranks if ranks[rank].error)
        self._merged["adapters"].append(AdapterLoaded(loaded.digest, next(errors, "")))

    def _add_failed_peer(self, rank: int, failed: tuple[str, str]) -> None:
        epoch, reason = failed
        if self._peers.pop(epoch, None) is not None:
            self._merged["failed_peers"].append((epoch, f"{self._parallel.position(rank)}: {reason}"))

    # ------------------------------------------------------------ merged outputs

    @property
    def has_events(self) -> bool:
        return any(self._merged.values())

    def missing(self, step: int) -> list[int]:
        """Return the ranks that have not reported a step."""
        return self._missing(self._steps.get(step))

    def missing_read(self, read_id: int) -> list[int]:
        """Return the ranks that have not reported a read."""
        return self._missing(self._reads.get(read_id))

    def _missing(self, reports: dict[int, Any] | None) -> list[int]:
        return [] if reports is None else [rank for rank in self._ranks if rank not in reports]

    @property
    def waiting_for(self) -> str:
        """Describe the ranks that have not reported what other ranks have; empty if none."""
        waits = [(f"step {step}", self.missing(step)) for step in self._steps]
        waits += [(f"read {read_id}", self.missing_read(read_id)) for read_id in self._reads]
        return "; ".join(
            f"{self._parallel.position(rank)} has not ended {what}"
            for what, missing in waits
            if len(missing) < len(self._ranks)
            for rank in missing
        )

    def take(self, step: int) -> ModelRunnerOutput:
        """Return the output of a step that every rank has reported, with all connector events since the last call.

        The output is the sampling rank's, with the digests of all ranks.
        """
        reports = self._steps.pop(step)
        assert len(reports) == len(self._ranks), f"step {step} has not ended on every rank"
        digests = tuple(
            self._sum_digests(order, {rank: report.digests[index] for rank, report in reports.items()})
            for index, order in enumerate(self._digests_of_steps.pop(step))
        )
        output = msgspec.structs.replace(reports[self._sampling_rank], digests=digests)
        return ModelRunnerOutput(output, self.take_events())

    def take_events(self) -> KVConnectorOutput:
        if not self.has_events:
            return EMPTY_CONNECTOR_OUTPUT
        events = KVConnectorOutput(**{field: tuple(items) for field, items in self._merged.items()})
        for items in self._merged.values():
            items.clear()
        return events

    def _sum_digests(self, order: DigestOrder, digests_of: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Add the digests of all ranks that hold different parts, modulo 2⁶⁴ as int64.

        Ranks may hold the same part of each block, of which one counts. Each has a part of recurrent state of its own.
        """
        num_blocks = len(order.block_ids)
        blocks = zip(*(digests_of[rank][:num_blocks] for rank in self._digesting), strict=True)
        states = zip(*(digests[num_blocks:] for digests in digests_of.values()), strict=True)
        return tuple((sum(parts) + 2**63) % 2**64 - 2**63 for parts in chain(blocks, states))
