"""What ``pdserve doctor`` finds: a line for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from pdserve.errors import PdserveError
from pdserve.process import one_line


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # a node would start, and be slower or less safe than it might
    FAIL = "fail"  # a node would not start, or not do what its flags ask for


class Finding(msgspec.Struct, frozen=True):
    """``remedy`` says what to do about it; empty where nothing is to be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<5} {self.check:<11} {self.text}{remedy}"


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARN, text, remedy)


def fail(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, Level.FAIL, text, remedy)


def found(check: str, look: Callable[[], Finding]) -> Finding:
    """What ``look`` finds. Errors that a node would have at its start are findings, too: they name their remedy."""
    try:
        return look()
    except (PdserveError, OSError) as exc:
        return fail(check, one_line(exc))
