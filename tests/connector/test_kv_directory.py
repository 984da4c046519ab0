"""The directory of KV on disk: whatever happens to its files, a read has the bytes that were written, or nothing.

Bytes that a disk has changed are found by digest, later (tests/engine/test_disk_tier.py).
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

from fast_set import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.backends.disk.kv_directory import Full, KVDirectory, NewFile

FOLDER = "f" * 32
LIMIT = 12_000
SIZES = (300, 1000, 4000)  # bytes per block of three models; multiples of 4096 bypass the page cache
NAMES = [f"{number:032x}-{number:016x}-b0" for number in range(40)]


def content(name: str) -> bytes:
    return random.Random(name).randbytes(SIZES[NAMES.index(name) % len(SIZES)])


def age(path: Path) -> None:
    """A file that was begun long ago, by a process that is dead."""
    os.utime(path, (0, 0))


class Directory(RuleBasedStateMachine):
    """Two processes on one directory; another program changes and removes files."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "kv"
        self.processes = [KVDirectory(self.root, LIMIT) for _ in range(2)]
        self.harmed: set[str] = set()  # names whose bytes were changed
        self.count_is_right = True  # no program has removed files behind the count

    def teardown(self) -> None:
        shutil.rmtree(self.root.parent)

    names = st.sampled_from(NAMES)
    process = st.integers(0, 1)

    def create(self, directory: KVDirectory, name: str) -> NewFile | None:
        path = directory.path(FOLDER, name)
        size = len(content(name))
        if directory.has(path, size):
            return None
        try:
            return directory.create(path, size)
        except Full:
            directory.make_room(size)
        try:
            return directory.create(path, size)
        except Full:
            return None

    @rule(name=names, at=process)
    def write(self, name: str, at: int) -> None:
        if (file := self.create(self.processes[at], name)) is not None:
            os.pwrite(file.fd, content(name), 0)
            file.commit()
            self.harmed.discard(name)

    @rule(name=names, at=process)
    def fail_to_write(self, name: str, at: int) -> None:
        if (file := self.create(self.processes[at], name)) is not None:
            os.pwrite(file.fd, content(name)[:100], 0)
            file.discard()

    @rule(name=names, at=process, written=st.floats(0, 1))
    def die_amid_a_write(self, name: str, at: int, written: float) -> None:
        if (file := self.create(self.processes[at], name)) is not None:
            data = content(name)
            os.pwrite(file.fd, data[: int(written * len(data))], 0)
            os.close(file.fd)
            age(file._new)
            self.processes[at] = KVDirectory(self.root, LIMIT)

    @rule(name=names, at=process)
    def read(self, name: str, at: int) -> None:
        directory = self.processes[at]
        data = content(name)
        fd = directory.open(directory.path(FOLDER, name), len(data))
        if fd is None:
            return
        assert os.pread(fd, len(data), 0) == data or name in self.harmed
        directory.touch(fd)
        os.close(fd)

    @rule(name=names, keep=st.floats(0, 0.99))
    def truncate(self, name: str, keep: float) -> None:
        path = self.processes[0].path(FOLDER, name)
        if path.exists():
            os.truncate(path, int(keep * len(content(name))))
            self.count_is_right = False

    @rule(name=names, at=st.floats(0, 0.99))
    def flip(self, name: str, at: float) -> None:
        path = self.processes[0].path(FOLDER, name)
        if path.exists():
            data = bytearray(path.read_bytes())
            if data:
                data[int(at * len(data))] ^= 1
                path.write_bytes(data)
                self.harmed.add(name)

    @rule(at=process)
    def scan(self, at: int) -> None:
        names: list[str] = []
        self.processes[at].scan(lambda folder, name: names.append(name))
        assert sorted(names) == sorted(path.name for path in self.root.glob("*/*/*") if "new" not in path.name)
        assert not list(self.root.glob("*/*/*.new")), "the file of a dead process stays"
        self.count_is_right = True

    @precondition(lambda self: self.root.exists())
    @rule()
    def remove_all(self) -> None:
        shutil.rmtree(self.root)
        self.count_is_right = True  # the count has gone, too

    @invariant()
    def is_bounded(self) -> None:
        sizes = [path.stat().st_size for path in self.root.glob("*/*/*")]
        assert sum(sizes) <= LIMIT
        if self.count_is_right and self.root.exists():
            assert self.processes[0].used >= sum(sizes)


Directory.TestCase.settings = settings(examples(60), stateful_step_count=40, deadline=None)
TestDirectory = Directory.TestCase


def fill(directory: KVDirectory, names: list[str]) -> None:
    for name in names:
        file = directory.create(directory.path(FOLDER, name), 1000)
        os.pwrite(file.fd, bytes(1000), 0)
        file.commit()


def present(directory: KVDirectory, names: list[str]) -> list[str]:
    return [name for name in names if directory.path(FOLDER, name).exists()]


def use(directory: KVDirectory, names: list[str]) -> None:
    """Open and touch these files, as a read does."""
    for name in names:
        fd = directory.open(directory.path(FOLDER, name), 1000)
        assert fd is not None
        directory.touch(fd)
        os.close(fd)


def test_blocks_that_were_used_once_leave_first_and_the_oldest_of_them(tmp_path: Path) -> None:
    directory = KVDirectory(tmp_path, 10_000)
    fill(directory, NAMES[:10])
    use(directory, NAMES[:3])
    assert directory.make_room(1500) == 2
    assert present(directory, NAMES[:10]) == NAMES[:3] + NAMES[5:10]


def test_blocks_that_were_used_again_leave_room_for_others(tmp_path: Path) -> None:
    """Reused blocks have four fifths of the room. The block whose last use but one is the oldest goes first."""
    directory = KVDirectory(tmp_path, 10_000)
    fill(directory, NAMES[:10])
    use(directory, NAMES[:9])
    assert directory.make_room(1500) == 2
    assert present(directory, NAMES[:10]) == NAMES[1:9]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "photos" / "ab"
    own.mkdir(parents=True)
    others = [own / "x.jpg", own / NAMES[9], tmp_path / FOLDER / NAMES[9][:2] / f"{NAMES[9]}.bak"]
    directory = KVDirectory(tmp_path, 3_000)
    fill(directory, NAMES[:3])
    for path in others:
        path.write_bytes(bytes(50_000))
    directory.scan(lambda folder, name: None)
    assert directory.used == 3_000
    assert directory.make_room(3_000) == 3
    assert all(path.exists() for path in others)


def test_only_one_process_evicts(tmp_path: Path) -> None:
    one = KVDirectory(tmp_path, 3_000)
    other = KVDirectory(tmp_path, 3_000)
    fill(one, NAMES[:3])
    with one._locked("evictor"):
        assert other.make_room(1000) == 0
    assert other.make_room(1000) >= 1
