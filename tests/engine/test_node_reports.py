"""Reports of a node's load and cache to routers, whatever changes while they read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from functools import reduce
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.reports import NodeReports, sample_bits
from pdserve.hashing import unpack_block_hashes
from pdserve.ipc.messages import EventBatch, Status, Totals
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.message_limits import MAX_REPORTED_BLOCKS

NODE = pb.NodeDescription(node_id="n", state="ready")
REPORT_INTERVAL = 1.0  # seconds


def batch(
    cached: tuple[int, ...] = (),
    evicted: tuple[int, ...] = (),
    running: int = 0,
    free: int = 10,
    total: int = 10,
    prompt_seconds: float = 0.0,
    images: tuple[int, ...] = (),
    dropped_images: tuple[int, ...] = (),
) -> EventBatch:
    status = Status(free, total - free, 0, 0, total, 0, 0, running, Totals(prompt_seconds=prompt_seconds))
    return EventBatch(
        status,
        cached=list(map(block_hash, cached)),
        evicted=list(map(block_hash, evicted)),
        images_cached=list(map(block_hash, images)),
        images_dropped=list(map(block_hash, dropped_images)),
    )


def block_hash(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"the rest"


def applied(cached: set[int], report: pb.NodeReport) -> set[int]:
    return applied_change(cached, report.cache)


def applied_change(held: set[int], change: pb.CacheChange) -> set[int]:
    held = held - set(unpack_block_hashes(change.removed)) | set(unpack_block_hashes(change.added))
    assert change.digest == reduce(xor, held, 0)
    return held


@given(st.lists(st.sets(st.integers(0, 20)), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_slow_reader_ends_with_the_current_cache(caches: list[set[int]], reads: list[bool]) -> None:
    async def watch() -> set[int]:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        before = set[int]()
        cached = set[int]()
        unread = True  # else the next report comes after REPORT_INTERVAL
        async with aclosing(node_reports.subscribe()) as reports:
            for now, read in zip(caches, reads, strict=False):
                node_reports.on_batch(batch(tuple(now - before), tuple(before - now)))
                unread = unread or now != before
                before = now
                if read and unread:
                    cached = applied(cached, await anext(reports))
                    unread = False
            node_reports.end()
            async for report in reports:
                cached = applied(cached, report)
        return cached

    assert asyncio.run(watch()) == caches[-1]


@given(
    st.lists(st.lists(st.integers(0, 20), unique=True), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(3, 25),
)
def test_a_slow_reader_ends_with_the_newest_images(states: list[list[int]], reads: list[bool], limit: int) -> None:
    """States list images, the oldest first. An engine that begins again has none."""

    async def watch() -> tuple[set[int], set[int], set[int]]:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        now: list[int] = []
        held = set[int]()
        unread = True
        async with aclosing(node_reports.subscribe()) as reports:
            for state, read in zip(states, reads, strict=False):
                added = [image for image in state if image not in now]
                dropped = [image for image in now if image not in state]
                now = [image for image in now if image in state] + added
                node_reports.on_batch(batch(images=tuple(added), dropped_images=tuple(dropped)))
                unread = unread or bool(added or dropped)
                if read and unread:
                    held = applied_change(held, (await anext(reports)).images)
                    unread = False
            async with aclosing(node_reports.subscribe()) as late:
                late_held = applied_change(set(), (await anext(late)).images)
            node_reports.begin_engine()
            node_reports.on_batch(batch(images=(99,)))
            node_reports.end()
            async for report in reports:
                held = applied_change(held, report.images)
        return late_held, set(now), held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.reports.MAX_REPORTED_IMAGES", limit)
        late, cached, last = asyncio.run(watch())
    assert late <= cached
    assert late == cached or len(late) <= limit
    assert last == {99}


def test_more_images_than_the_limit_leave_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.reports.MAX_REPORTED_IMAGES", 2)

    async def watch() -> list[set[int]]:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        seen = [set[int]()]
        async with aclosing(node_reports.subscribe()) as reports:
            for images in ((1,), (2, 3), (4, 5, 6)):
                node_reports.on_batch(batch(images=images))
                seen.append(applied_change(seen[-1], (await anext(reports)).images))
        return seen[1:]

    assert asyncio.run(watch()) == [{1}, {2, 3}, {5, 6}]


def test_reports_are_numbered_and_carry_only_changed_descriptions() -> None:
    async def watch() -> list[pb.NodeReport]:
        states = ["loading"]
        seen = []
        node_reports = NodeReports(lambda: pb.NodeDescription(node_id="n", state=states[-1]), pause=0.0)
        changes: list[Callable[[], None]] = [
            lambda: node_reports.on_batch(batch(running=1)),
            lambda: states.append("ready"),
            node_reports.end,
        ]
        async for report in node_reports.subscribe():
            seen.append(report)
            if changes:
                changes.pop(0)()
                node_reports.wake()
        return seen

    reports = asyncio.run(watch())
    assert [report.sequence for report in reports] == [1, 2, 3, 4]
    assert [report.description.state for report in reports] == ["loading", "", "ready", ""]
    assert [report.load.running for report in reports] == [0, 1, 1, 1]


@pytest.fixture
def no_periodic_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only changes cause reports."""
    monkeypatch.setattr("node.reports._REPORT_INTERVAL", 3600.0)


async def settle() -> None:
    """Let all tasks run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_periodic_reports")
def test_free_blocks_that_drift_slowly_are_reported_once_they_differ_from_the_last_report() -> None:
    """Each batch takes one block of 1000; more than 1 % is reported, which eleven batches are."""

    async def watch() -> list[int]:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        seen = []
        node_reports.on_batch(batch(free=1000, total=1000))
        async with aclosing(node_reports.subscribe()) as reports:
            seen.append((await anext(reports)).load.free_blocks)
            report = asyncio.ensure_future(anext(reports))
            for free in range(999, 960, -1):
                await settle()
                node_reports.on_batch(batch(free=free, total=1000))
                await settle()
                if report.done():
                    seen.append(report.result().load.free_blocks)
                    report = asyncio.ensure_future(anext(reports))
            report.cancel()
            await asyncio.wait([report])
        return seen

    assert asyncio.run(watch()) == [1000, 989, 978, 967]


@pytest.mark.usefixtures("no_periodic_reports")
def test_each_subscriber_is_compared_with_its_own_last_report() -> None:
    async def watch() -> list[bool]:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        node_reports.on_batch(batch(free=1000, total=1000))
        async with aclosing(node_reports.subscribe()) as early, aclosing(node_reports.subscribe()) as late:
            await anext(early)
            node_reports.on_batch(batch(free=994, total=1000))
            await anext(late)
            reports = [asyncio.ensure_future(anext(stream)) for stream in (early, late)]
            await settle()
            node_reports.on_batch(batch(free=988, total=1000))  # 12 less than early's report, 6 less than late's
            await settle()
            reported = [report.done() for report in reports]
            for report in reports:
                report.cancel()
            await asyncio.wait(reports)
            return reported

    assert asyncio.run(watch()) == [True, False]


def test_a_router_that_wants_fewer_reports_still_gets_one_per_interval() -> None:
    async def watch(pause: float) -> float:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        async with aclosing(node_reports.subscribe(pause)) as reports:
            await anext(reports)
            node_reports.on_batch(batch(running=1))
            began = time.monotonic()
            assert (await anext(reports)).load.running == 1
            return time.monotonic() - began

    assert asyncio.run(watch(0.05)) >= 0.05
    assert asyncio.run(watch(1e6)) >= REPORT_INTERVAL


def test_a_sample_of_a_large_cache_is_reported() -> None:
    bits = sample_bits(4 * MAX_REPORTED_BLOCKS)
    assert [sample_bits(count) for count in (1, MAX_REPORTED_BLOCKS, MAX_REPORTED_BLOCKS + 1)] == [0, 0, 1]
    assert bits == 2

    async def watch() -> set[int]:
        large = pb.NodeDescription(cache_sample_bits=bits)
        node_reports = NodeReports(lambda: large)
        node_reports.on_batch(batch(tuple(range(20))))
        async with aclosing(node_reports.subscribe()) as reports:
            return applied(set(), await anext(reports))

    assert asyncio.run(watch()) == {0, 4, 8, 12, 16}


def test_an_engine_reports_nothing_of_the_one_before_it() -> None:
    """The new engine's counters begin at 0 and its cache is empty, so the prompt share stays a share."""

    async def watch() -> list[pb.NodeReport]:
        node_reports = NodeReports(lambda: NODE, pause=0.0)
        seen = []
        cached = set[int]()
        async with aclosing(node_reports.subscribe()) as reports:
            node_reports.on_batch(batch((1, 2), running=9, free=1, prompt_seconds=3600.0))
            cached = applied(cached, await anext(reports))
            node_reports.begin_engine()
            seen.append(await anext(reports))
            cached = applied(cached, seen[-1])
            node_reports.on_batch(batch(running=2, prompt_seconds=1e-6))
            seen.append(await anext(reports))
            assert not cached
        return seen

    idle, busy = asyncio.run(watch())
    assert (idle.load.running, idle.load.prompt_share) == (0, 0.0)
    assert busy.load.running == 2
    assert 0.0 <= busy.load.prompt_share <= 1.0
