"""Threads of a rank that move blocks between host memory and files, so that no step waits for a disk.

    step loop ──transfer──► queue of reads  ──► thread ─┐
                    └─────► queue of writes ──► thread ─┼► results ──poll──► step loop
                            scans, on rank 0  ─ thread ─┘

A failed operation is not tried again for a while: a failing disk costs a log line, and no time. Reads, writes and
removals fail separately. The disk works if some blocks of an order can be moved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from connector.backends.disk.file_transfer import NoTransfer, move_plainly, open_transfer
from connector.backends.disk.kv_directory import Full, InTheWay, KVDirectory, NewFile
from connector.backends.file_spans import FileTransfer, Span
from connector.backends.host_memory import CopyingHostMemory, HostPlace
from connector.backends.lane import Lane
from pdserve.errors import PdserveError
from pdserve.host.process import log_failure
from pdserve.kv.disk_transfers import (
    AnyDiskOrder,
    BlockName,
    DiskEvent,
    DiskLate,
    DiskListing,
    DiskOrder,
    DiskResult,
    DiskWork,
    OpenDisk,
    Outcome,
    parse_name,
)

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 30.0  # seconds without attempts after a failure
_LONGEST_PAUSE = 600.0  # seconds
_OPEN_FILES = 64  # at once
_SCAN_SECONDS = 60.0  # least pause between scans: they find what other nodes have written and evicted
_SCAN_SHARE = 1 / 100  # largest share of the time for scans
_LISTED_AT_ONCE = 500  # names
_LISTED_AHEAD = 4  # events that the step loop has not taken: with more of them, a scan waits
_CLOSE_SECONDS = 2.0  # seconds for a thread to end: a transfer may hang with its disk


class DiskSetup(NamedTuple):
    """One rank's part of the directory."""

    root: Path
    limit: int  # bytes of all files of blocks
    agent: str  # name of NIXL's agents
    part: str  # all that the bytes of this rank's blocks depend on, beside the version of the weights
    lists: bool  # it scans the directory for the scheduler


class _Attempts:
    """Whether an operation is worth a try: after failures, not for a while."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pause = 0.0
        self._until = 0.0

    @property
    def allowed(self) -> bool:
        return time.monotonic() >= self._until

    def failed(self, error: str) -> None:
        if not self._pause:
            _log.warning("KV on disk: %s fail, and are tried again later: %s", self._what, error)
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._until = time.monotonic() + self._pause

    def worked(self) -> None:
        if self._pause:
            _log.info("KV on disk: %s work again", self._what)
        self._pause = 0.0


class _Events:
    """Filled on any thread, drained by ``poll``; each event is followed by a call of ``on_progress``."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._events: list[DiskEvent] = []

    def __len__(self) -> int:
        """Number of events that were not taken yet."""
        return len(self._events)

    def add(self, event: DiskEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._on_progress()

    def poll(self) -> tuple[DiskEvent, ...]:
        if not self._events:
            return ()
        with self._lock:
            events = tuple(self._events)
            self._events = []
        return events


class DiskThreads:
    """Implements pdserve.protocols.DiskKV."""

    def __init__(self, setup: DiskSetup, memory: CopyingHostMemory, on_progress: Callable[[], None]) -> None:
        self._directory = KVDirectory(setup.root, setup.limit)
        self._setup = setup
        self._memory = memory
        self._events = _Events(on_progress)
        self._version = ""
        self._folder = ""
        self._closed = False
        self._timers: dict[int, threading.Timer] = {}  # by id of the read
        self._transfers: dict[bool, FileTransfer] = {True: NoTransfer(), False: NoTransfer()}  # keys: True for reads
        self._attempts = {
            DiskWork.READ: _Attempts("reads"),
            DiskWork.WRITE: _Attempts("writes"),
            DiskWork.REMOVE: _Attempts("removals"),
        }
        self._lanes = {
            True: Lane("kv disk reads", lambda: self._begin(True), self._execute),
            False: Lane("kv disk writes", lambda: self._begin(False), self._execute),
        }
        self._wake = threading.Event()
        self._scanner = threading.Thread(target=self._scan_always, name="kv disk scans", daemon=True)
        if setup.lists:
            self._scanner.start()

    def order(self, order: AnyDiskOrder) -> None:
        if isinstance(order, OpenDisk):
            self._open(order.version)
            return
        if order.patience:
            timer = threading.Timer(order.patience, self._events.add, (DiskLate(order.order_id),))
            timer.daemon = True
            self._timers[order.order_id] = timer
            timer.start()
        self._lanes[order.work is DiskWork.READ].put((order, self._folder))

    def _open(self, version: str) -> None:
        self._version = version
        key = f"{version} {self._setup.part}"
        self._folder = hashlib.blake2b(key.encode(), digest_size=16).hexdigest() if version else ""
        self._wake.set()

    def poll(self) -> tuple[DiskEvent, ...]:
        return self._events.poll()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._directory.stop()
        self._wake.set()
        for timer in tuple(self._timers.values()):
            timer.cancel()
        for lane in self._lanes.values():
            lane.close(_CLOSE_SECONDS)

    # ------------------------------------------------------------ on the threads of reads and writes

    def _begin(self, read: bool) -> None:
        name = f"{self._setup.agent or os.getpid()}-disk-{'reads' if read else 'writes'}"
        self._transfers[read] = open_transfer(name, self._setup.root)

    def _move(self, files: list[tuple[int, HostPlace]], read: bool) -> list[str]:
        """Move the content of open files. Return an error for each, or an empty string.

        What NIXL cannot move is moved by plain calls, which say what is wrong with which file.
        """
        transfer = self._transfers[read]
        spans = [Span(fd, place.address, place.num_bytes) for fd, place in files]
        try:
            for _, place in files:
                transfer.register(place.piece, place.piece_bytes)
            problem = transfer.move(spans, read) if spans else ""
        except PdserveError as exc:
            problem = str(exc)
        if not problem:
            return [""] * len(spans)
        errors = [move_plainly(span, read) for span in spans]
        if not any(errors) and not isinstance(transfer, NoTransfer):  # so the files are all right
            _log.warning("KV on disk: plain file calls from now on, since NIXL failed: %s", problem)
            self._transfers[read] = NoTransfer()
        return errors

    def _execute(self, job: tuple[DiskOrder, str]) -> None:
        order, folder = job
        start = time.perf_counter()
        parts = list[_Part]()
        execute = {DiskWork.READ: self._read, DiskWork.WRITE: self._write, DiskWork.REMOVE: self._remove}[order.work]
        for blocks in _parts(order):
            parts.append(part := _Part(len(blocks)))
            if self._attempts[order.work].allowed:
                self._note(order.work, part, execute(blocks, folder, part))
        if (timer := self._timers.pop(order.order_id, None)) is not None:
            timer.cancel()
        self._events.add(
            DiskResult(
                order.order_id,
                outcomes=tuple(outcome for part in parts for outcome in part.outcomes),
                num_bytes=sum(part.num_bytes for part in parts),
                seconds=time.perf_counter() - start,
                num_failed=sum(part.num_failed for part in parts),
                num_evicted=sum(part.num_evicted for part in parts),
            )
        )

    # Each returns the first error that concerns more than a single block, or an empty string.

    def _write(self, blocks: list[tuple[BlockName, int]], folder: str, part: _Part) -> str:
        new: dict[int, tuple[NewFile, HostPlace]] = {}
        error = ""
        try:
            for at, (name, number) in enumerate(blocks):
                place = self._memory.place(number, name.slot)
                path = self._directory.path(folder, name.text())
                if self._directory.has(path, place.num_bytes):
                    part.outcomes[at] = Outcome.DONE
                elif (file := self._create(path, place.num_bytes, part)) is not None:
                    new[at] = file, place
        except OSError as exc:
            error = str(exc)
        errors = self._move([(file.fd, place) for file, place in new.values()], read=False)
        for (at, (file, place)), problem in zip(new.items(), errors, strict=True):
            try:
                if problem:
                    file.discard()
                else:
                    file.commit()
                    part.done(at, place.num_bytes)
            except InTheWay:
                continue
            except OSError as exc:
                problem = str(exc)
            error = error or problem
        return error

    def _create(self, path: Path, num_bytes: int, part: _Part) -> NewFile | None:
        """Create a file, and evict others for it. Return None if there is no room for it. Raises OSError."""
        with suppress(InTheWay):
            try:
                return self._directory.create(path, num_bytes)
            except Full:
                part.num_evicted += self._directory.make_room(num_bytes)
            with suppress(Full):
                return self._directory.create(path, num_bytes)
        return None

    def _read(self, blocks: list[tuple[BlockName, int]], folder: str, part: _Part) -> str:
        files: dict[int, tuple[int, HostPlace]] = {}
        error = ""
        try:
            for at, (name, number) in enumerate(blocks):
                place = self._memory.place(number, name.slot)
                fd = self._directory.open(self._directory.path(folder, name.text()), place.num_bytes)
                if fd is None:
                    part.outcomes[at] = Outcome.MISSING
                else:
                    files[at] = fd, place
        except OSError as exc:
            error = str(exc)
        errors = self._move(list(files.values()), read=True)
        for (at, (fd, place)), problem in zip(files.items(), errors, strict=True):
            if not problem:
                part.done(at, place.num_bytes)
                self._directory.touch(fd)
            error = error or problem
            os.close(fd)
        return error

    def _remove(self, blocks: list[tuple[BlockName, int]], folder: str, part: _Part) -> str:
        try:
            for at, (name, _) in enumerate(blocks):
                self._directory.remove(self._directory.path(folder, name.text()))
                part.done(at)
        except OSError as exc:
            return str(exc)
        return ""

    def _note(self, work: DiskWork, part: _Part, error: str) -> None:
        """Note whether operations work."""
        part.num_failed += bool(error)
        if part.num_done:
            self._attempts[work].worked()
        elif error:
            self._attempts[work].failed(error)

    # ------------------------------------------------------------ scans

    def _scan_always(self) -> None:
        attempts = _Attempts("scans")
        pause = 0.0
        try:
            while not self._closed:
                self._wake.wait(pause or None)
                self._wake.clear()
                start = time.monotonic()
                if self._folder and not self._closed:
                    try:
                        self._list(self._version, self._folder)
                        attempts.worked()
                    except OSError as exc:
                        attempts.failed(str(exc))
                pause = max(_SCAN_SECONDS, (time.monotonic() - start) / _SCAN_SHARE)
        except Exception as exc:
            log_failure(_log, exc)

    def _list(self, version: str, folder: str) -> None:
        """Report the blocks of the rank's folder, in parts. Raises OSError."""
        names: list[BlockName] = []
        self._events.add(DiskListing(version, (), begins=True))

        def found(found_in: str, text: str) -> None:
            if found_in != folder or (name := parse_name(text)) is None:
                return
            names.append(name)
            if len(names) >= _LISTED_AT_ONCE:
                self._events.add(DiskListing(version, tuple(names)))
                names.clear()
                while len(self._events) > _LISTED_AHEAD and not self._closed:
                    time.sleep(0.01)

        self._directory.scan(found)
        self._events.add(DiskListing(version, tuple(names), ends=True))


class _Part:
    """The outcomes of the blocks that one thread moves for an order."""

    def __init__(self, count: int) -> None:
        self.outcomes = [Outcome.FAILED] * count
        self.num_done = 0  # without the blocks that were there already
        self.num_bytes = 0
        self.num_failed = 0
        self.num_evicted = 0

    def done(self, at: int, num_bytes: int = 0) -> None:
        self.outcomes[at] = Outcome.DONE
        self.num_done += 1
        self.num_bytes += num_bytes


def _parts(order: DiskOrder) -> Iterator[list[tuple[BlockName, int]]]:
    blocks = list(zip(order.names, order.places, strict=True))
    for begin in range(0, len(blocks), _OPEN_FILES):
        yield blocks[begin : begin + _OPEN_FILES]
