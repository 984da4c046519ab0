"""Findings of ``pdserve doctor``: one line per check."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import ParamSpec

import msgspec

from pdserve.errors import PdserveError
from pdserve.host.process import one_line

P = ParamSpec("P")


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # right for a machine by itself, but not once other hosts take part
    WARN = "warn"  # a node would start, but slower or less safe than possible
    FAIL = "fail"  # a node would not start, or not do what its flags say


class Finding(msgspec.Struct, frozen=True):
    """Result of one check. ``remedy`` is empty if there is nothing to do; ``run_check`` sets ``check``, its name."""

    check: str
    level: Level
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<5} {self.check:<11} {self.text}{remedy}"


def ok(text: str) -> Finding:
    return Finding("", Level.OK, text)


def note(text: str, remedy: str) -> Finding:
    return Finding("", Level.NOTE, text, remedy)


def warn(text: str, remedy: str) -> Finding:
    return Finding("", Level.WARN, text, remedy)


def fail(text: str, remedy: str = "") -> Finding:
    return Finding("", Level.FAIL, text, remedy)


def run_check(name: str, check: Callable[P, Finding], *args: P.args, **kwargs: P.kwargs) -> Finding:
    """Return the findings of ``check``. An error that a node would raise at its start is a finding, too."""
    try:
        finding = check(*args, **kwargs)
    except (PdserveError, OSError) as exc:
        finding = fail(one_line(exc))
    return msgspec.structs.replace(finding, check=name)
