"""The directory of --disk-kv, which all nodes of a host may share: a file per block, found by its name.

    PATH/used                     bytes in the directory, as 8 bytes; a lock on it covers each change
    PATH/evictor                  locked by the process that evicts
    PATH/<folder>/3f/<name>       a block of a rank; its folder stands for all that its meaning depends on
    PATH/<folder>/3f/<name>.….new   a block that is being written, locked by its writer

A name has the hash of the block and the digest of its bytes (``BlockName``). A file is written under another name
and renamed, so a name has a whole block. After a crash of the host its bytes may be wrong: the digest tells. No file is
ever changed. Bytes are counted before they are written, and until their file is gone: a process that dies in between
leaves the count too high, until the next scan corrects it.

Folders have names of hexadecimal digits. Other files in the directory are left alone. Where one lies in place of a
block or its folder, no block is read or written.

Order of eviction: by the last use but one (LRU-2), which is the access time of a file; the last use is its modification
time. Blocks that were used only once, when they were written, have access time 0: they go first, until those that were
used again have four fifths of the room.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

_PROVEN_SHARE = 4 / 5  # largest share of the room for blocks that were used again
_EVICTED_AT_ONCE = 1 / 20  # share of the room that an eviction leaves free: few evictions need a scan
_CANDIDATES = 20_000  # files that a scan finds, of each kind
_PAUSE = 1e-3  # seconds between parts of a scan, so that it holds the interpreter for short times only
_PART = 64  # files
_NEW = ".new"
_NEW_SECONDS = 60.0  # time for the writer of a new file to lock it
_FOLDER = re.compile(r"[0-9a-f]{32}")
_PART_FOLDER = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}-[bs][0-9]+(\.[0-9a-f]+-[0-9]+\.new)?")  # BlockName
#: Errors of a path with something else in place of a block or its folder: a directory, a file, a link, a socket.
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP)
_NO_BLOCK = (*_IN_THE_WAY, errno.ENOENT, errno.ENXIO, errno.EACCES)
_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK  # follow no link, wait for no writer of a pipe
_DIRECT_BYTES = 4096  # alignment of addresses and sizes
_PROCESS = secrets.token_hex(4)  # containers may have equal process ids
_numbers = count()


class Full(Exception):
    """The directory has no room for a block, and this process cannot make any now."""


class InTheWay(Exception):
    """Something that is no block lies in place of a block, or of its folder."""


class _Candidate(NamedTuple):
    """A file that may be evicted. The first two fields are its place in the order."""

    used_before: int  # nanoseconds, as below; 0: it was used once
    used_at: int
    path: str
    num_bytes: int


class _Oldest:
    """The ``_CANDIDATES`` oldest of all that are added."""

    def __init__(self) -> None:
        self._kept: list[_Candidate] = []
        self.num_bytes = 0  # bytes of all added candidates, kept or not

    def add(self, candidate: _Candidate) -> None:
        self.num_bytes += candidate.num_bytes
        self._kept.append(candidate)
        if len(self._kept) >= 2 * _CANDIDATES:
            self._kept = sorted(self._kept)[:_CANDIDATES]

    def last_first(self) -> list[_Candidate]:
        return sorted(self._kept, reverse=True)


class KVDirectory:
    """One process's access. Any thread may call; one at a time evicts. All methods may raise OSError."""

    def __init__(self, root: Path, limit: int) -> None:
        """``limit``: bytes of all files of blocks."""
        self.root = root
        self.limit = limit
        self._evicting = threading.Lock()
        self._once: list[_Candidate] = []  # used once, the next one to evict last
        self._again: list[_Candidate] = []  # used again, the next one to evict last
        self._again_bytes = 0
        self._direct = True  # until the file system refuses it
        self._stopped = False

    def stop(self) -> None:
        """End scans. Any thread may call it."""
        self._stopped = True

    # ------------------------------------------------------------ files

    def path(self, folder: str, name: str) -> Path:
        return self.root / folder / name[:2] / name

    def open(self, path: Path, num_bytes: int) -> int | None:
        """Open a block for reading. Return None if there is none; a file that has not ``num_bytes`` is removed."""
        try:
            fd = self._open(path, os.O_RDONLY | _AS_IT_IS, num_bytes)
        except OSError as exc:
            if exc.errno in _NO_BLOCK:
                return None
            raise
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size == num_bytes:
            return fd
        os.close(fd)
        self.remove(path)
        return None

    def touch(self, fd: int) -> None:
        """Note a use of a block: its last use becomes the last but one."""
        with suppress(OSError):  # a read-only directory keeps its order
            os.utime(fd, ns=(os.fstat(fd).st_mtime_ns, time.time_ns()))

    def has(self, path: Path, num_bytes: int) -> bool:
        """Whether a whole block is there. A file of another size is removed."""
        fd = self.open(path, num_bytes)
        if fd is None:
            return False
        os.close(fd)
        return True

    def remove(self, path: Path) -> bool:
        """Remove a block. Return whether this call did."""
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return False
            path.unlink()
        except OSError as exc:
            if exc.errno in _NO_BLOCK:
                return False
            raise
        self._add_used(-status.st_size)
        return True

    def create(self, path: Path, num_bytes: int) -> NewFile:
        """Open a new file for writing, which has its name once it is committed. Raises Full, InTheWay."""
        if self._add_used(num_bytes, self.limit) < 0:
            raise Full
        new = path.with_name(f"{path.name}.{_PROCESS}-{next(_numbers)}{_NEW}")
        try:
            try:
                fd = self._open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, num_bytes)
            except FileNotFoundError:
                make_private(new.parent)
                fd = self._open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, num_bytes)
        except OSError as exc:
            self._add_used(-num_bytes)
            if exc.errno in _IN_THE_WAY:
                raise InTheWay from exc
            raise
        file = NewFile(self, fd, new, path, num_bytes)
        try:
            os.ftruncate(fd, num_bytes)  # a scan sees the size
            with suppress(OSError):  # where there are no locks, a scan may remove the file, and its write fails
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.discard()
            raise
        return file

    def _open(self, path: Path, flags: int, num_bytes: int) -> int:
        """Open a file past the page cache if possible, so that measured throughput is the disk's."""
        if self._direct and num_bytes % _DIRECT_BYTES == 0:
            try:
                return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
            if flags & os.O_CREAT:  # some systems create it nevertheless
                path.unlink(missing_ok=True)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            self._direct = not stat.S_ISREG(os.fstat(fd).st_mode)  # directories refuse it everywhere
            return fd
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    # ------------------------------------------------------------ room

    @property
    def used(self) -> int:
        """Bytes of all files of blocks."""
        return self._add_used(0)

    def _add_used(self, num_bytes: int, limit: int | None = None) -> int:
        """Change the count. Return the new one, or -1 if it would exceed ``limit``: then it stays."""
        with self._locked("used") as fd:
            used = int.from_bytes(os.pread(fd, 8, 0), "little")  # 0 if the file is new
            total = max(0, used + num_bytes)
            if limit is not None and total > limit:
                return -1
            if num_bytes:
                os.pwrite(fd, total.to_bytes(8, "little"), 0)
            return total

    @contextmanager
    def _locked(self, name: str, flags: int = 0) -> Iterator[int]:
        path = self.root / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            make_private(self.root)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | flags)
            yield fd
        finally:
            os.close(fd)

    def make_room(self, num_bytes: int) -> int:
        """Evict blocks until more than ``num_bytes`` are free, if no other process evicts. Return how many went."""
        goal = max(0, int(self.limit * (1 - _EVICTED_AT_ONCE)) - num_bytes)
        num_evicted = 0
        with suppress(BlockingIOError), self._evicting, self._locked("evictor", fcntl.LOCK_NB):
            num_evicted += self._evict(goal)
            if self.used > goal:
                self._scan(lambda folder, name: None)
                num_evicted += self._evict(goal)
        return num_evicted

    def _evict(self, goal: int) -> int:
        num_evicted = 0
        while self.used > goal and (self._once or self._again):
            too_many = self._again_bytes > _PROVEN_SHARE * self.limit
            again = self._again and (too_many or not self._once)
            candidate = (self._again if again else self._once).pop()
            path = Path(candidate.path)
            with suppress(FileNotFoundError):
                status = path.lstat()
                if (status.st_atime_ns, status.st_mtime_ns) == candidate[:2] and self.remove(path):
                    num_evicted += 1
                    self._again_bytes -= candidate.num_bytes if again else 0
        return num_evicted

    # ------------------------------------------------------------ scans

    def scan(self, on_block: Callable[[str, str], None]) -> None:
        """Call ``found`` with the folder and name of every block, and correct the count of bytes."""
        with self._evicting:
            try:
                with self._locked("evictor", fcntl.LOCK_NB):
                    self._scan(on_block)
            except OSError:  # another process evicts, or the directory is read-only
                self._scan(on_block, correct=False)

    def _scan(self, on_block: Callable[[str, str], None], correct: bool = True) -> None:
        """Find what to evict next. Blocks written meanwhile may be counted twice, until the next scan."""
        before = self.used if correct else 0
        once = _Oldest()
        again = _Oldest()
        being_written = 0
        for number, entry in enumerate(self._entries()):
            if self._stopped:
                return
            if number % _PART == 0:
                time.sleep(_PAUSE)
            with suppress(FileNotFoundError):
                at = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(at.st_mode):
                    continue
                if entry.name.endswith(_NEW):
                    being_written += at.st_size if self._is_alive(entry.path, at.st_mtime) else 0
                    continue
                candidate = _Candidate(at.st_atime_ns, at.st_mtime_ns, entry.path, at.st_size)
                (again if candidate.used_before else once).add(candidate)
                on_block(entry.path.split(os.sep)[-3], entry.name)
        self._once = once.last_first()
        self._again = again.last_first()
        self._again_bytes = again.num_bytes
        if correct:
            self._add_used(once.num_bytes + again.num_bytes + being_written - before)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield all files of blocks."""
        for folder in _folders(self.root, _FOLDER):
            for part in _folders(folder.path, _PART_FOLDER):
                with suppress(FileNotFoundError), os.scandir(part.path) as entries:
                    yield from (entry for entry in entries if _BLOCK.fullmatch(entry.name))

    def _is_alive(self, path: str, written_at: float) -> bool:
        """Whether the writer of a new file lives. If not, the file is removed."""
        if time.time() - written_at < _NEW_SECONDS:
            return True
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _AS_IT_IS)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


class NewFile:
    """A block that is being written. It ends with ``commit`` or ``discard``."""

    def __init__(self, directory: KVDirectory, fd: int, new: Path, path: Path, num_bytes: int) -> None:
        self.fd = fd
        self._directory = directory
        self._new = new
        self._path = path
        self._num_bytes = num_bytes

    def __repr__(self) -> str:
        return f"NewFile({self._new.name}, {self._num_bytes} bytes)"

    def commit(self) -> None:
        """Give the file its name. Raises OSError, InTheWay, and then it is discarded."""
        try:
            os.utime(self.fd, ns=(0, time.time_ns()))
            os.rename(self._new, self._path)
        except OSError as exc:
            self.discard()
            if exc.errno in _IN_THE_WAY:
                raise InTheWay from exc
            raise
        os.close(self.fd)

    def discard(self) -> None:
        with suppress(OSError):
            os.unlink(self._new)
        os.close(self.fd)
        with suppress(OSError):
            self._directory._add_used(-self._num_bytes)


def make_private(path: Path) -> None:
    """Make a directory, with those above it that are missing, which only this user may enter. Raises OSError."""
    for directory in reversed((path, *path.parents)):
        if not directory.exists():
            directory.mkdir(mode=0o700, exist_ok=True)


def _folders(path: Path | str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        return [entry for entry in entries if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    return []
