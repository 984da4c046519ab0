"""What the ranks of a node report, put together: a step, a read or a connection is told of once, when every rank has.

    rank 0   step 7 ─────────── read 3 ──────────────┐
    rank 1   step 7 ──────────────────── read 3 ─────┤ ReadResult of read 3, with the next output that is taken
    rank 2   ──────── step 7 ────── read 3 ──────────┘
                            └ output of step 7 may be taken

Pure bookkeeping: what was ordered is expected of every rank, whatever else is reported (twice, too late, of an order
that was taken back) changes nothing. Reports are never altered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.config.parallel import ParallelConfig
from pdserve.kv import KVShare
from pdserve.records import (
    EMPTY_CONNECTOR_OUTPUT,
    KVConnectorOutput,
    ModelRunnerOutput,
    ReadResult,
    StepOutput,
    StepPlan,
)
from pdserve.transports import Connected, joined


@dataclass(slots=True)
class _Read:
    """One that not every rank has ended yet."""

    result: ReadResult  # of the ranks that have
    ended: set[int] = field(default_factory=set)  # ranks

    def add(self, rank: int, result: ReadResult, name: str) -> None:
        so_far, error = self.result, self.result.error or (f"{name}: {result.error}" if result.error else "")
        self.ended.add(rank)
        self.result = ReadResult(
            result.read_id,
            error,
            so_far.num_bytes + result.num_bytes,
            so_far.num_descriptors + result.num_descriptors,
            max(so_far.seconds, result.seconds),
        )


class Aggregator:
    """Of one node. ``shares`` says what each rank holds of the KV."""

    def __init__(self, split: ParallelConfig, shares: tuple[KVShare, ...]) -> None:
        self._split = split
        self._ranks = range(split.num_ranks)
        self._sampling_rank = (split.pp - 1) * split.tp
        self._digesting = tuple(rank for rank in self._ranks if shares[rank] not in shares[:rank])
        self._steps: dict[int, dict[int, StepOutput]] = {}  # by step, then rank
        self._reads: dict[int, _Read] = {}
        self._peers: dict[str, dict[int, Connected]] = {}  # by epoch, then rank
        self._results: list[ReadResult] = []  # from here on, what nobody was told of yet
        self._connected: list[Connected] = []
        self._failed: list[tuple[str, str]] = []

    # ------------------------------------------------------------ orders

    def expect(self, plan: StepPlan) -> None:
        """Every rank is about to be given this plan."""
        self._steps[plan.step] = {}
        for read in plan.connector.reads:
            self._reads[read.read_id] = _Read(ReadResult(read.read_id))
        for epoch in plan.connector.disconnect:
            self._peers.pop(epoch, None)
        for peer in plan.connector.connect:
            self._peers[peer.epoch] = {}

    # ------------------------------------------------------------ reports

    def add(self, rank: int, output: ModelRunnerOutput) -> None:
        """A rank's output of a step, or of no step, with what its connector has to tell."""
        reports = self._steps.get(output.step.step)
        if reports is not None:
            reports.setdefault(rank, output.step)
        if output.connector:
            self._add_news(rank, output.connector)

    def _add_news(self, rank: int, news: KVConnectorOutput) -> None:
        for result in news.finished_recving:
            self._add_result(rank, result)
        for connection in news.connected:
            self._add_connected(rank, connection)
        for epoch, reason in news.failed_peers:
            if self._peers.pop(epoch, None) is not None:
                self._failed.append((epoch, f"{self._split.place(rank)}: {reason}"))

    def _add_result(self, rank: int, result: ReadResult) -> None:
        read = self._reads.get(result.read_id)
        if read is None or rank in read.ended:
            return
        read.add(rank, result, str(self._split.place(rank)))
        if len(read.ended) == len(self._ranks):
            del self._reads[result.read_id]
            self._results.append(read.result)

    def _add_connected(self, rank: int, connection: Connected) -> None:
        ranks = self._peers.get(connection.epoch)
        if ranks is None or rank in ranks:
            return
        ranks[rank] = connection
        if len(ranks) == len(self._ranks):
            self._connected.append(joined([ranks[each] for each in self._ranks]))

    # ------------------------------------------------------------ what can be told

    @property
    def has_news(self) -> bool:
        """Whether ``take`` has something to tell beyond the step."""
        return bool(self._results or self._connected or self._failed)

    def missing(self, step: int) -> list[int]:
        """The ranks that have not ended a step."""
        reports = self._steps.get(step)
        return [] if reports is None else [rank for rank in self._ranks if rank not in reports]

    def missing_read(self, read_id: int) -> list[int]:
        """The ranks that have not ended a read."""
        read = self._reads.get(read_id)
        return [] if read is None else [rank for rank in self._ranks if rank not in read.ended]

    @property
    def waiting_for(self) -> str:
        """For people: which ranks have not reported what others have; empty where none has, or all."""
        waits = [(f"step {step}", self.missing(step)) for step in self._steps]
        waits += [(f"read {read_id}", self.missing_read(read_id)) for read_id in self._reads]
        return "; ".join(
            f"{self._split.place(rank)} has not ended {what}"
            for what, missing in waits
            if len(missing) < len(self._ranks)
            for rank in missing
        )

    def take(self, step: int) -> ModelRunnerOutput:
        """The output of a step that no rank misses, and all news since the last call."""
        reports = self._steps.pop(step)
        assert len(reports) == len(self._ranks), f"step {step} has not ended on every rank"
        digests = _add_up(reports[rank].digests for rank in self._digesting)
        drawn = reports[self._sampling_rank]
        return ModelRunnerOutput(StepOutput(step, drawn.samples, digests, drawn.prompt_logprobs), self.take_news())

    def take_news(self) -> KVConnectorOutput:
        """All news since the last call."""
        if not self.has_news:
            return EMPTY_CONNECTOR_OUTPUT
        news = KVConnectorOutput(tuple(self._results), tuple(self._connected), tuple(self._failed))
        self._results, self._connected, self._failed = [], [], []
        return news


def _add_up(digests: Iterable[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    """Those of ranks that hold different parts of each block: of every order, a signed 64-bit number per block."""
    return tuple(
        tuple(_signed(sum(parts)) for parts in zip(*order, strict=True)) for order in zip(*digests, strict=True)
    )


def _signed(number: int) -> int:
    """Modulo 2⁶⁴, as int64."""
    return (number + 2**63) % 2**64 - 2**63
