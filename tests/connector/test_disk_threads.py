"""The worker side of KV on disk: all bytes come back, by NIXL and by plain calls, and a failing disk costs no block."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from machine import patience

import connector
from connector.backends.disk import disk_threads
from connector.backends.disk.file_transfer import NoTransfer, open_transfer
from connector.backends.file_spans import Span
from connector.backends.nixl.file_agent import NixlFiles
from connector.setup import ConnectorSetup
from pdserve.errors import NodeError
from pdserve.kv.disk_transfers import (
    BlockName,
    DiskEvent,
    DiskListing,
    DiskOrder,
    DiskResult,
    DiskWork,
    OpenDisk,
    Outcome,
    parse_name,
)
from pdserve.kv.host_copies import HostCopy, HostRoom
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion

NUM = 8  # blocks on the device, and twice as many in host memory
DONE = Outcome.DONE
MISSING = Outcome.MISSING
FAILED = Outcome.FAILED


def layout(rows: int) -> KVLayout:
    return KVLayout(NUM, 4, 4, 1, FullAttentionSpec(1, rows, "float32"))


LAYOUTS = {"pages": layout(128), "other": layout(5)}  # blocks of 4,096 bytes, and of 160


def name_of(number: int, digest: int = 7) -> BlockName:
    return BlockName(slot=False, group=0, block_hash=bytes([number]) * 16, digest=digest)


class Rank:
    """A rank on a CPU, with host memory and files."""

    def __init__(self, path: Path, layout: KVLayout, limit: int = 1 << 20) -> None:
        self.memory = bytearray(layout.total_bytes)
        self.size = layout.block_bytes
        self._progress = threading.Event()
        self._numbers = iter(range(1, 1000))
        address = ctypes.addressof((ctypes.c_char * len(self.memory)).from_buffer(self.memory))
        region = KVRegion(address, len(self.memory), "cpu", 0)
        setup = ConnectorSetup(f"disk-test-{id(self)}")
        self.host = connector.host_memory(HostRoom(2 * NUM), region, layout, setup, self._progress.set)
        self.disk = connector.disk_kv(str(path), limit, self.host, layout, setup, self._progress.set)
        self.events: list[DiskEvent] = []
        self.host.allocate()
        self._wait(lambda: self.host.poll()[1])
        self.disk.order(OpenDisk("v1"))

    def _wait(self, poll: Callable[[], Any]) -> Any:
        while not (result := poll()):
            assert self._progress.wait(patience(20.0))
            self._progress.clear()
        return result

    def fill(self, number: int, place: int) -> None:
        """Put the content of a block into a place of host memory."""
        self.memory[: self.size] = self.content(number)
        self._copy(HostCopy(next(self._numbers), load=False, blocks=(0,), host_blocks=(place,)))

    def content(self, number: int) -> bytes:
        return bytes((number * 37 + at) % 251 for at in range(self.size))

    def in_host(self, place: int) -> bytes:
        self._copy(HostCopy(next(self._numbers), load=True, blocks=(1,), host_blocks=(place,)))
        return bytes(self.memory[self.size : 2 * self.size])

    def _copy(self, order: HostCopy) -> None:
        self.host.copy(order)
        self._wait(lambda: self.host.poll()[0])

    def order(self, work: DiskWork, numbers: list[int], first_place: int = 0, patience: float = 0.0) -> DiskResult:
        order_id = next(self._numbers)
        places = tuple(range(first_place, first_place + len(numbers)))
        self.disk.order(DiskOrder(order_id, work, tuple(map(name_of, numbers)), places, patience))
        while True:
            for event in self._poll():
                if isinstance(event, DiskResult) and event.order_id == order_id:
                    return event

    def _poll(self) -> tuple[DiskEvent, ...]:
        events: tuple[DiskEvent, ...] = self._wait(self.disk.poll)
        self.events += events
        return events

    def listed(self) -> set[BlockName]:
        """Return the names of the first scan."""
        while not any(isinstance(event, DiskListing) and event.ends for event in self.events):
            self._poll()
        return {name for event in self.events if isinstance(event, DiskListing) for name in event.names}

    def write(self, numbers: list[int]) -> tuple[int, ...]:
        for place, number in enumerate(numbers):
            self.fill(number, place)
        return self.order(DiskWork.WRITE, numbers).outcomes

    def close(self) -> None:
        self.disk.close()
        self.host.close()


@contextmanager
def rank(path: Path, kind: str = "pages", limit: int = 1 << 20) -> Iterator[Rank]:
    opened = Rank(path, LAYOUTS[kind], limit)
    try:
        yield opened
    finally:
        opened.close()


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*/*"))


@pytest.fixture(params=["nixl", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "plain":
        monkeypatch.setattr(disk_threads, "open_transfer", lambda agent, folder: NoTransfer())
    elif not isinstance(open_transfer("disk-probe", tmp_path), NixlFiles):
        pytest.skip("NIXL's POSIX back end does not work on this machine")
    return str(request.param)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_come_back_after_a_restart(way: str, kind: str, tmp_path: Path) -> None:
    with rank(tmp_path / "kv", kind) as writer:
        assert writer.write([1, 2, 3, 4]) == (DONE,) * 4
    with rank(tmp_path / "kv", kind) as reader:
        assert reader.listed() == {name_of(number) for number in (1, 2, 3, 4)}
        result = reader.order(DiskWork.READ, [4, 2, 9], first_place=NUM)
        assert result.outcomes == (DONE, DONE, MISSING)
        assert result.num_bytes == 2 * reader.size
        assert [reader.in_host(NUM + at) for at in (0, 1)] == [reader.content(4), reader.content(2)]


class FailingTransfer:
    """NIXL that works at the start, and then in no transfer."""

    def __init__(self, step: str) -> None:
        self._step = step

    def register(self, address: int, num_bytes: int) -> None:
        if self._step == "register":
            raise NodeError("no memory can be registered")

    def move(self, spans: Sequence[Span], read: bool) -> str:
        return "the back end is gone"


@pytest.mark.parametrize("step", ["register", "move"])
def test_blocks_are_moved_by_plain_calls_once_nixl_fails(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_threads, "open_transfer", lambda agent, folder: FailingTransfer(step))
    with rank(tmp_path / "kv") as one:
        for number in (1, 3):
            assert one.write([number, number + 1]) == (DONE, DONE)
            assert one.order(DiskWork.READ, [number + 1], first_place=NUM).outcomes == (DONE,)
            assert one.in_host(NUM) == one.content(number + 1)
    assert len([message for message in caplog.messages if "since NIXL failed" in message]) == 2, "reads, and writes"


def test_truncated_and_removed_files_are_missing(way: str, tmp_path: Path) -> None:
    with rank(tmp_path / "kv") as one:
        one.write([1, 2, 3])
        cut, gone, whole = files(tmp_path / "kv")
        cut.write_bytes(cut.read_bytes()[:-1])
        gone.unlink()
        assert one.order(DiskWork.READ, [1, 2, 3], NUM).outcomes == (MISSING, MISSING, DONE)
        assert files(tmp_path / "kv") == [whole]
        assert one.write([1]) == (DONE,), "it is written again"
        assert one.order(DiskWork.READ, [1], NUM).outcomes == (DONE,)


def test_directory_that_vanishes_is_made_again(tmp_path: Path) -> None:
    with rank(tmp_path / "kv") as one:
        one.write([1])
        shutil.rmtree(tmp_path / "kv")
        assert one.order(DiskWork.READ, [1]).outcomes == (MISSING,)
        assert one.write([2]) == (DONE,)
        assert one.order(DiskWork.READ, [2]).outcomes == (DONE,)


@contextmanager
def no_large_files() -> Iterator[None]:
    """No file may grow: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_fails_writes_but_no_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_threads, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(disk_threads, "_LONGEST_PAUSE", 0.0)
    with rank(tmp_path / "kv") as one:
        one.write([1])
        for number in (2, 3):
            one.fill(number, number)
        with no_large_files():
            results = [one.order(DiskWork.WRITE, [number], number) for number in (2, 3)]
            assert [result.outcomes for result in results] == [(FAILED,), (FAILED,)]
            assert [result.num_failed for result in results] == [1, 1]
            assert one.order(DiskWork.READ, [1]).outcomes == (DONE,)
        assert len(files(tmp_path / "kv")) == 1, "something is left of a write that failed"
        assert one.order(DiskWork.WRITE, [2], 2).outcomes == (DONE,)
        assert one.order(DiskWork.READ, [2], NUM).outcomes == (DONE,)
        assert one.in_host(NUM) == one.content(2)


def test_failing_disk_is_left_alone_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rank(tmp_path / "kv") as one:
        one.fill(1, 0)
        one.fill(2, 1)
        with no_large_files():
            assert one.order(DiskWork.WRITE, [1]).num_failed == 1
        again = one.order(DiskWork.WRITE, [2], 1)
        assert (again.outcomes, again.num_failed) == ((FAILED,), 0)
        assert [record.message for record in caplog.records if "writes fail" in record.message] != []
        assert len([record for record in caplog.records if "writes fail" in record.message]) == 1


def test_path_that_is_no_directory_has_and_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with rank(tmp_path / "kv") as one:
        one.fill(1, 0)
        failed = one.order(DiskWork.WRITE, [1])
        assert (failed.outcomes, failed.num_failed) == ((FAILED,), 1)
        assert one.order(DiskWork.READ, [1]).outcomes == (MISSING,)


def test_only_the_user_may_enter_what_is_created(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        with rank(tmp_path / "new" / "kv") as one:
            one.write([1])
    finally:
        os.umask(mask)
    created = list((tmp_path / "new").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in created if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new", *created) if path.is_dir()} == {0o700}


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "loop of links": lambda path: path.symlink_to(path),
    "link": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_in_place_of_a_block_harms_no_other_block(obstacle: str, tmp_path: Path) -> None:
    with rank(tmp_path / "kv") as one:
        one.write([1, 2, 3])
        first, *_ = files(tmp_path / "kv")
        first.unlink()
        OBSTACLES[obstacle](first)
        read = one.order(DiskWork.READ, [1, 2, 3], NUM)
        assert (read.outcomes, read.num_failed) == ((MISSING, DONE, DONE), 0)
        removed = one.order(DiskWork.REMOVE, [1])
        assert (removed.num_failed, os.path.lexists(first)) == (0, True), "it is not ours"
    with rank(tmp_path / "kv") as one:
        assert one.listed() == {name_of(2), name_of(3)}
        assert one.write([1, 4])[1:] == (DONE,)
        assert one.order(DiskWork.READ, [2, 3, 4], NUM).outcomes == (DONE,) * 3
        assert one.write([5]) == (DONE,)


def test_file_in_place_of_a_folder_harms_no_other_block(tmp_path: Path) -> None:
    with rank(tmp_path / "kv") as one:
        one.write([1, 2])
        first, _ = files(tmp_path / "kv")
        shutil.rmtree(first.parent)
        first.parent.write_text("a file")
        assert one.order(DiskWork.READ, [1, 2], NUM).outcomes == (MISSING, DONE)
        assert one.write([1, 3]) == (FAILED, DONE)
        assert one.order(DiskWork.READ, [3], NUM).outcomes == (DONE,)


def test_faulty_files_are_removed_while_writes_fail(tmp_path: Path) -> None:
    with rank(tmp_path / "kv") as one:
        one.write([1])
        one.fill(2, 1)
        with no_large_files():
            assert one.order(DiskWork.WRITE, [2], 1).num_failed == 1
        one.order(DiskWork.REMOVE, [1])
        assert files(tmp_path / "kv") == []


def test_files_of_several_ranks_stay_within_the_limit(tmp_path: Path) -> None:
    limit = 6 * LAYOUTS["pages"].block_bytes
    with rank(tmp_path / "kv", limit=limit) as one, rank(tmp_path / "kv", limit=limit) as other:
        for number in range(1, 20, 2):
            assert one.write([number]) == (DONE,)
            assert other.write([number + 1]) == (DONE,)
            assert sum(path.stat().st_size for path in files(tmp_path / "kv")) <= limit
        assert one.order(DiskWork.READ, [20]).outcomes == (DONE,)


def test_other_layouts_and_versions_read_nothing(tmp_path: Path) -> None:
    with rank(tmp_path / "kv") as one, rank(tmp_path / "kv", "other") as other:
        one.write([1])
        assert other.order(DiskWork.READ, [1]).outcomes == (MISSING,)
        one.disk.order(OpenDisk("v2"))
        assert one.order(DiskWork.READ, [1]).outcomes == (MISSING,)


def test_names_survive_and_foreign_files_have_none() -> None:
    name = BlockName(slot=True, group=3, block_hash=bytes(range(16)), digest=-5)
    assert parse_name(name.text()) == name
    for text in ("", "used", name.text() + ".new", name.text()[1:], name.text().upper()):
        assert parse_name(text) is None
