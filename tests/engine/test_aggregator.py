"""Outputs of ranks, in every possible order, merge into one output per step, one result per read, one connection."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.executor.aggregator import OutputAggregator
from pdserve.config.parallel import ParallelConfig
from pdserve.kv.disk_transfers import DiskEvent, DiskLate, DiskOrder, DiskResult, DiskWork, Outcome
from pdserve.kv.layout import KVShare
from pdserve.kv.transports import Connected
from pdserve.records import (
    EMPTY_CONNECTOR_OUTPUT,
    EMPTY_OUTPUT,
    DigestOrder,
    KVConnectorOrders,
    KVConnectorOutput,
    KVRead,
    ModelRunnerOutput,
    Peer,
    ReadResult,
    StepOutput,
)

SPLITS = [
    ParallelConfig((4,)),
    ParallelConfig((4,), 2),
    ParallelConfig((2, 2)),
    ParallelConfig((3, 1), 2),
    ParallelConfig((4,), 4),
]
NUM_KV_HEADS = 2


def aggregator_of(parallel: ParallelConfig) -> OutputAggregator:
    positions = (parallel.position(rank) for rank in range(parallel.num_ranks))
    shares = [
        KVShare.of_rank(position.stage, parallel.stage_layers, position.shard, parallel.tp, NUM_KV_HEADS)
        for position in positions
    ]
    return OutputAggregator(parallel, tuple(shares))


def events(*results: ReadResult) -> ModelRunnerOutput:
    return ModelRunnerOutput(EMPTY_OUTPUT.step, KVConnectorOutput(results))


def connected(transport: str, epoch: str = "e") -> ModelRunnerOutput:
    return ModelRunnerOutput(EMPTY_OUTPUT.step, KVConnectorOutput(connected=(Connected(epoch, transport, transport),)))


def failed_peer(reason: str, epoch: str = "e") -> ModelRunnerOutput:
    return ModelRunnerOutput(EMPTY_OUTPUT.step, KVConnectorOutput(failed_peers=((epoch, reason),)))


def orders_of(*reads: int, connect: bool = False, disconnect: bool = False) -> KVConnectorOrders:
    """Read r has the local block 10 r and the one after it."""
    orders = tuple(KVRead(read, "e", (10 * read, 10 * read + 1), (0, 1)) for read in reads)
    peers = (Peer("p", "e", ()),) if connect else ()
    return KVConnectorOrders(peers, ("e",) if disconnect else (), orders)


@dataclass
class Script:
    """The reports of each rank, in their order, and the orders before each step."""

    parallel: ParallelConfig
    orders: dict[int, KVConnectorOrders]  # by step
    reports: list[list[ModelRunnerOutput]]  # by rank
    failing: set[tuple[int, int]] = field(default_factory=set)  # (read, rank)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Some steps with reads; every rank ends each read some steps after it was ordered, or between steps."""
    parallel = draw(st.sampled_from(SPLITS))
    num_steps = draw(st.integers(1, 4))
    reads_of = {step: draw(st.lists(st.integers(0, 9), max_size=2)) for step in range(1, num_steps + 1)}
    numbers = iter(range(1, 100))
    orders = {step: orders_of(*[next(numbers) for _ in reads]) for step, reads in reads_of.items()}
    script = Script(parallel, orders, [])
    for rank in range(parallel.num_ranks):
        steps = [StepOutput(step, (rank,)) for step in orders]
        ends: dict[int, list[ReadResult]] = {step: [] for step in orders}
        late: list[ModelRunnerOutput] = []
        for step, ordered in orders.items():
            for read in ordered.reads:
                failed = draw(st.integers(0, 5)) == 0
                if failed:
                    script.failing.add((read.read_id, rank))
                result = ReadResult(read.read_id, "broken" if failed else "", 8, 2, 0.5 + rank)
                at = draw(st.integers(step, num_steps + 1))
                if at in ends:
                    ends[at].append(result)
                else:
                    late.append(events(result))
        reports = [ModelRunnerOutput(output, KVConnectorOutput(tuple(ends[output.step]))) for output in steps]
        script.reports.append(reports + late)
    return script


@given(scripts(), st.data())
def test_every_step_and_read_completes_once_and_never_early(script: Script, data: st.DataObject) -> None:
    """Reports of ranks interleave in any order. Some come twice, or again much later."""
    aggregator = aggregator_of(script.parallel)
    before = msgspec.msgpack.encode(script.reports)
    waiting = [list(reports) for reports in script.reports]
    given_out: list[tuple[int, ModelRunnerOutput]] = []
    ended: Counter[int] = Counter()
    steps_of: dict[int, set[int]] = {step: set() for step in script.orders}
    reads_of: dict[int, set[int]] = {read.read_id: set() for orders in script.orders.values() for read in orders.reads}

    def check(output: KVConnectorOutput) -> None:
        for result in output.finished_recving:
            ended[result.read_id] += 1
            assert reads_of[result.read_id] == set(range(script.parallel.num_ranks)), "a read has ended early"
            failing = [rank for read, rank in script.failing if read == result.read_id]
            assert bool(result.error) == bool(failing)
            assert (result.num_bytes, result.num_descriptors) == tuple(n * script.parallel.num_ranks for n in (8, 2))
            assert result.seconds == 0.5 + script.parallel.num_ranks - 1
            assert any(result.error == f"{script.parallel.position(rank)}: broken" for rank in failing) or not failing

    for step, orders in script.orders.items():
        aggregator.expect_transfers(orders)
        aggregator.expect_step(step)
    while any(waiting):
        rank = data.draw(st.sampled_from([rank for rank, reports in enumerate(waiting) if reports]))
        report = waiting[rank].pop(0)
        given_out.append((rank, report))
        repeated = data.draw(st.lists(st.sampled_from(given_out), max_size=2))
        for from_rank, rank_output in [(rank, report), *repeated]:
            aggregator.add(from_rank, rank_output)
            if rank_output.step.step in steps_of:
                steps_of[rank_output.step.step].add(from_rank)
            for result in rank_output.connector.finished_recving:
                reads_of[result.read_id].add(from_rank)
            for read_id, ranks in reads_of.items():
                if not ended[read_id] and len(ranks) < script.parallel.num_ranks:
                    assert set(aggregator.missing_read(read_id)) == set(range(script.parallel.num_ranks)) - ranks
        if data.draw(st.booleans()):
            check(aggregator.take_events())
    for step in script.orders:
        assert aggregator.missing(step) == []
        output = aggregator.take(step)
        sampling = (script.parallel.pp - 1) * script.parallel.tp
        assert output.step == StepOutput(step, (sampling,))
        check(output.connector)
    assert ended == dict.fromkeys(reads_of, 1)
    for rank, report in given_out:  # reports whose steps and reads are over
        aggregator.add(rank, report)
    assert aggregator.waiting_for == ""
    assert aggregator.take_events() is EMPTY_CONNECTOR_OUTPUT
    assert msgspec.msgpack.encode(script.reports) == before, "reports were altered"
    assert not EMPTY_OUTPUT.connector
    assert ModelRunnerOutput(StepOutput(0)) == EMPTY_OUTPUT


@pytest.mark.parametrize("missing", range(4))
def test_a_rank_without_report_keeps_steps_and_reads_open_and_is_named(missing: int) -> None:
    parallel = ParallelConfig((2, 2), 2)
    aggregator = aggregator_of(parallel)
    aggregator.expect_transfers(orders_of(3))
    aggregator.expect_step(5)
    assert aggregator.waiting_for == ""
    for rank in set(range(4)) - {missing}:
        aggregator.add(rank, ModelRunnerOutput(StepOutput(5), KVConnectorOutput((ReadResult(3),))))
    assert aggregator.missing(5) == aggregator.missing_read(3) == [missing]
    assert not aggregator.has_events
    position = f"rank {missing} (stage {missing // 2}, shard {missing % 2})"
    assert aggregator.waiting_for == f"{position} has not ended step 5; {position} has not ended read 3"


def test_digests_add_up_and_replicated_kv_counts_once() -> None:
    """4 shards of 2 heads: ranks 0 and 1 hold the same, 2 and 3 too. Each has a part of a recurrent state."""
    aggregator = aggregator_of(ParallelConfig((4,), 4))
    aggregator.expect_step(1, (DigestOrder((1, 2), 32), DigestOrder((3,), 16, state_slots=(5,))))
    for rank, values in enumerate([(2**63 - 1, 1, 5), (111, 222, 333), (1, -4, 6), (444, 555, 666)]):
        aggregator.add(rank, ModelRunnerOutput(StepOutput(1, digests=(values[:2], (values[2], rank)))))
    assert aggregator.take(1).step.digests == ((-(2**63), -3), (11, 6))


def test_digests_beside_steps_are_reported_once_with_the_sum_of_all_ranks() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 4))
    aggregator.expect_transfers(KVConnectorOrders(digests=((7, DigestOrder((1, 2), 32)),)))
    for rank, values in enumerate([(2**63 - 1, 1), (111, 222), (1, -4), (444, 555)]):
        assert not aggregator.has_events
        report = ModelRunnerOutput(EMPTY_OUTPUT.step, KVConnectorOutput(digested=((7, values),)))
        aggregator.add(rank, report)
        aggregator.add(rank, report)
    assert aggregator.take_events().digested == ((7, (-(2**63), -3)),)
    assert not aggregator.has_events


def test_a_connection_is_reported_once_when_every_rank_has_it() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    aggregator.expect_transfers(orders_of(connect=True))
    aggregator.add(0, connected("nvlink"))
    aggregator.add(0, connected("nvlink"))
    assert not aggregator.has_events
    aggregator.add(1, connected("tcp"))
    assert aggregator.take_events().connected == (Connected("e", "tcp", "nvlink | tcp"),)
    aggregator.add(1, connected("tcp"))
    assert not aggregator.has_events
    aggregator.expect_transfers(orders_of(connect=True))  # a repeated order is reported again
    aggregator.add(1, connected("tcp"))
    aggregator.add(0, connected("tcp"))
    assert aggregator.take_events().connected == (Connected("e", "tcp", "tcp"),)


def test_a_peer_fails_with_the_first_rank_that_reports_it() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    aggregator.expect_transfers(orders_of(connect=True))
    aggregator.add(1, failed_peer("no way"))
    assert aggregator.take_events().failed_peers == (("e", "rank 1 (stage 0, shard 1): no way"),)
    aggregator.add(0, connected("tcp"))
    aggregator.add(0, failed_peer("broke"))
    assert not aggregator.has_events
    aggregator.expect_transfers(orders_of(connect=True))
    aggregator.add(0, connected("tcp"))
    aggregator.add(1, connected("tcp"))
    aggregator.add(0, failed_peer("broke"))  # later
    taken = aggregator.take_events()
    assert taken.connected
    assert taken.failed_peers == (("e", "rank 0 (stage 0, shard 0): broke"),)


def test_reports_on_a_disconnected_peer_are_ignored() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    aggregator.expect_transfers(orders_of(connect=True))
    aggregator.add(0, connected("tcp"))
    aggregator.expect_transfers(orders_of(disconnect=True))
    aggregator.add(1, connected("tcp"))
    aggregator.add(1, failed_peer("given up"))
    assert not aggregator.has_events


@pytest.mark.parametrize("output", [EMPTY_OUTPUT, ModelRunnerOutput(StepOutput(99))])
def test_outputs_of_no_or_unknown_steps_are_ignored(output: ModelRunnerOutput) -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    for rank in (0, 1, 1):
        aggregator.add(rank, output)
    assert aggregator.waiting_for == ""
    assert aggregator.take_events() is EMPTY_CONNECTOR_OUTPUT
    with pytest.raises(AttributeError):
        EMPTY_OUTPUT.step = StepOutput(1)  # type: ignore[misc]


class LaterStepOutput(StepOutput, frozen=True):
    """StepOutput with a field that the aggregator does not know."""

    new_field: str = ""


class LaterConnectorOutput(KVConnectorOutput, frozen=True):
    """KVConnectorOutput with a field that the aggregator does not know."""

    new_field: tuple[int, ...] = ()


def test_a_new_field_of_a_step_output_comes_from_the_sampling_rank() -> None:
    aggregator = aggregator_of(ParallelConfig((2, 2)))
    aggregator.expect_step(1)
    for rank in range(2):
        aggregator.add(rank, ModelRunnerOutput(LaterStepOutput(1, new_field=f"of rank {rank}")))
    step = aggregator.take(1).step
    assert isinstance(step, LaterStepOutput)
    assert step.new_field == "of rank 1"


def test_block_on_disk_is_of_use_only_if_every_rank_has_its_part() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    aggregator.expect_transfers(KVConnectorOrders(disk=(DiskOrder(1, DiskWork.READ, (), ()),)))

    def report(rank: int, *outcomes: Outcome, num_failed: int = 0) -> tuple[DiskEvent, ...]:
        result = DiskResult(1, outcomes, num_bytes=10, seconds=float(rank), num_failed=num_failed)
        aggregator.add(rank, ModelRunnerOutput(EMPTY_OUTPUT.step, KVConnectorOutput(disk=(result,))))
        return aggregator.take_events().disk

    done = Outcome.DONE
    missing = Outcome.MISSING
    failed = Outcome.FAILED
    assert report(1, done, done, missing, failed, num_failed=2) == ()
    assert report(1, done, done, done, done) == (), "a rank reports twice"
    (merged,) = report(0, done, missing, done, done, num_failed=1)
    assert merged == DiskResult(1, (done, missing, missing, failed), num_bytes=20, seconds=1.0, num_failed=2)


def test_read_that_is_late_on_several_ranks_is_late_once() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    aggregator.expect_transfers(KVConnectorOrders(disk=(DiskOrder(1, DiskWork.READ, (), ()),)))

    def report(rank: int, event: DiskEvent) -> tuple[DiskEvent, ...]:
        aggregator.add(rank, ModelRunnerOutput(EMPTY_OUTPUT.step, KVConnectorOutput(disk=(event,))))
        return aggregator.take_events().disk

    assert report(1, DiskLate(1)) == (DiskLate(1),)
    assert report(0, DiskLate(1)) == ()
    assert report(1, DiskResult(1, ())) == ()
    assert report(0, DiskResult(1, ())) == (DiskResult(1, ()),)
    assert report(0, DiskLate(1)) == (), "it has ended"


def test_a_new_field_of_a_connector_output_needs_a_merge_rule() -> None:
    aggregator = aggregator_of(ParallelConfig((4,), 2))
    output = LaterConnectorOutput(failed_peers=(("e", "no way"),), new_field=(1,))
    with pytest.raises(KeyError, match="new_field"):
        aggregator.add(0, ModelRunnerOutput(EMPTY_OUTPUT.step, output))
