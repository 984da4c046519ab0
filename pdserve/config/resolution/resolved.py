"""A resolved value with its reason. ``pdserve explain`` and the log of a node print the reasons."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

ValueT = TypeVar("ValueT")


class Resolved(NamedTuple, Generic[ValueT]):
    """A value that an option left open, and the reason for it."""

    value: ValueT
    reason: str = ""  # empty: the option names the value
    shown: str | None = None  # the value as printed, if not str(value); empty: the reason says enough


class Reasons:
    """Collects the reasons of resolved values, in order, as lines ``name=value: reason``."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def take(self, name: str, resolved: Resolved[ValueT]) -> ValueT:
        """Return the value, and keep the reason."""
        if resolved.reason:
            shown = str(resolved.value) if resolved.shown is None else resolved.shown
            self.lines.append(f"{name}={shown}: {resolved.reason}" if shown else f"{name}: {resolved.reason}")
        return resolved.value

    def note(self, line: str) -> None:
        """Keep a line that belongs to no option, such as a property of the checkpoint; nothing if it is empty."""
        if line:
            self.lines.append(line)
