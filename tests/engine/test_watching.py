"""What routers are told of a node's cache, whatever changes while they read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.node_reports import MOST_BLOCKS, NodeReports, sample_bits
from engine.ipc.messages import Batch, Status, Totals
from pdserve.hashing import unpack_numbers
from pdserve.pb import pdserve_pb2 as pb

NODE = pb.NodeDescription(node_id="n", state="ready")


def batch(cached: tuple[int, ...] = (), evicted: tuple[int, ...] = (), running: int = 0) -> Batch:
    status = Status(10, 0, 0, 0, 10, 0, 0, running, Totals())
    return Batch(status, cached=tuple(map(digest, cached)), evicted=tuple(map(digest, evicted)))


def digest(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"the rest"


def applied(known: set[int], report: pb.NodeReport) -> set[int]:
    return known - set(unpack_numbers(report.cache.removed)) | set(unpack_numbers(report.cache.added))


@given(st.lists(st.sets(st.integers(0, 20)), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_who_reads_when_it_can_knows_what_is_there(caches: list[set[int]], reads: list[bool]) -> None:
    async def watch() -> set[int]:
        watching, before, known = NodeReports(lambda: NODE, pause=0.0), set[int](), set[int]()
        news = True  # else the next report is a heartbeat
        async with aclosing(watching.reports()) as reports:
            for now, read in zip(caches, reads, strict=False):
                watching.on_batch(batch(tuple(now - before), tuple(before - now)))
                news, before = news or now != before, now
                if read and news:
                    known, news = applied(known, await anext(reports)), False
            watching.end()
            async for report in reports:
                known = applied(known, report)
        return known

    assert asyncio.run(watch()) == caches[-1]


def test_reports_are_numbered_and_describe_what_has_changed() -> None:
    async def watch() -> list[pb.NodeReport]:
        states, seen = ["loading"], []
        watching = NodeReports(lambda: pb.NodeDescription(node_id="n", state=states[-1]), pause=0.0)
        changes: list[Callable[[], None]] = [
            lambda: watching.on_batch(batch(running=1)),
            lambda: states.append("ready"),
            watching.end,
        ]
        async for report in watching.reports():
            seen.append(report)
            if changes:
                changes.pop(0)()
                watching.wake()
        return seen

    reports = asyncio.run(watch())
    assert [report.sequence for report in reports] == [1, 2, 3, 4]
    assert [report.description.state for report in reports] == ["loading", "", "ready", ""]
    assert [report.load.running for report in reports] == [0, 1, 1, 1]


def test_who_asks_for_fewer_reports_gets_them_and_hears_of_the_node_all_the_same() -> None:
    async def watch(pause: float) -> float:
        watching = NodeReports(lambda: NODE, pause=0.0)
        async with aclosing(watching.reports(pause)) as reports:
            await anext(reports)
            watching.on_batch(batch(running=1))
            began = time.monotonic()
            assert (await anext(reports)).load.running == 1
            return time.monotonic() - began

    assert asyncio.run(watch(0.05)) >= 0.05
    assert asyncio.run(watch(1e6)) >= 1.0  # the heartbeat


def test_of_large_caches_a_sample_is_told() -> None:
    bits = sample_bits(4 * MOST_BLOCKS)
    assert [sample_bits(count) for count in (1, MOST_BLOCKS, MOST_BLOCKS + 1)] == [0, 0, 1]
    assert bits == 2

    async def watch() -> set[int]:
        large = pb.NodeDescription(cache_sample_bits=bits)
        watching = NodeReports(lambda: large)
        watching.on_batch(batch(tuple(range(20))))
        async with aclosing(watching.reports()) as reports:
            return applied(set(), await anext(reports))

    assert asyncio.run(watch()) == {0, 4, 8, 12, 16}
