"""A pseudo-terminal that runs a program, as a user at a keyboard sees it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from machine import patience

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HOME = "\x1b[H"  # where a frame begins
PATIENCE = 30.0  # seconds


def environ() -> dict[str, str]:
    """Return the environment without variables that set the terminal width."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "PDSERVE_API_KEY")}


class Terminal:
    """A terminal that runs a program."""

    def __init__(self, argv: list[str], columns: int, lines: int) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        self.before = self.settings
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environ()
        )
        os.close(theirs)
        self.said = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a signal may cut a character

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._ours)

    @property
    def frame(self) -> list[str]:
        """Return the lines of the latest complete screen."""
        frames = self.said.split(HOME)
        return _CONTROL.sub("", frames[-2] if len(frames) > 1 else "").splitlines()

    def read_until(self, wanted: str | Callable[[list[str]], bool]) -> None:
        """Wait for a complete screen with the text or condition."""
        start = time.monotonic()
        text = wanted if isinstance(wanted, str) else ""
        fits = wanted if callable(wanted) else lambda frame: any(text in line for line in frame)
        while not (self.frame and fits(self.frame)):
            assert time.monotonic() < start + patience(PATIENCE), self.said
            self._read()

    def read_text(self, wanted: str, repeat: Callable[[], None] | None = None) -> str:
        """Wait for text that a program without frames prints; return what came before it, and forget both.

        ``repeat`` is called every five seconds until then.
        """
        start = time.monotonic()
        repeats = 0
        while wanted not in (text := _CONTROL.sub("", self.said)):
            waited = time.monotonic() - start
            assert waited < patience(PATIENCE), f"{wanted!r} is missing in {self.said!r}; {self._state()}"
            if repeat and waited > 5.0 * (repeats + 1):
                repeats += 1
                repeat()
            self._read()
        before, _, self.said = text.partition(wanted)
        return before

    def _state(self) -> str:
        """Return what the program waits for, and its signals: pending, blocked, ignored and caught."""
        process = Path(f"/proc/{self.process.pid}")
        status = [
            line for line in (process / "status").read_text().splitlines() if line.startswith(("State", "Sig", "Shd"))
        ]
        return " ".join([(process / "wchan").read_text(), *status])

    def wait(self) -> int:
        """Return the exit status of the program."""
        while self.process.poll() is None:
            self._read()
        return self.process.wait()

    def _read(self) -> None:
        if select.select([self._ours], [], [], 0.2)[0]:
            with suppress(OSError):  # the program has ended
                self.said += self._decoder.decode(os.read(self._ours, 65536))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def terminal(argv: list[str], columns: int = 80, lines: int = 30) -> Iterator[Terminal]:
    opened = Terminal(argv, columns, lines)
    try:
        yield opened
    finally:
        opened.close()
