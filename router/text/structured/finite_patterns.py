"""Patterns of ``patternProperties`` that match no name but declared ones.

After all declared properties, llguidance allows a comma for a name that such a pattern matches, and then no name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from router.text.structured.python_patterns import UnknownPattern, constants, parsed
from router.text.structured.work_budget import Budget


def matched_names(pattern: str, names: Collection[str], budget: Budget) -> set[str] | None:
    """Return the names that a pattern matches anywhere; None if it may match other texts, too.

    A pattern without ``^`` or ``$`` always does. Raises WorkExceeded.
    """
    try:
        parts = list(parsed(pattern, budget))
        anchors = [(constants.AT, constants.AT_BEGINNING), (constants.AT, constants.AT_END)]
        if len(parts) < 2 or [parts[0], parts[-1]] != anchors:
            return None
        budget.spend(len(names))
        return _Texts(frozenset(names), budget).of_sequence(parts[1:-1])
    except (UnknownPattern, RecursionError):
        return None


class _Texts:
    """Enumerates the texts that parts of a pattern match, up to the number and length of the names."""

    def __init__(self, names: frozenset[str], budget: Budget) -> None:
        self._names = names
        self._longest = max(map(len, names), default=0)
        self._budget = budget

    def of_sequence(self, parts: Iterable[Any], whole: bool = True) -> set[str]:
        """Raises UnknownPattern, for the ``whole`` pattern also if a text is no name."""
        texts = {""}
        for part in parts:
            texts = self._joined(texts, self._of_part(*part))
        if whole and not texts <= self._names:
            raise UnknownPattern
        return texts

    def _of_part(self, kind: Any, value: Any) -> set[str]:
        if kind is constants.LITERAL:
            return {chr(value)}
        if kind is constants.IN:
            return self._bounded(chain.from_iterable(self._characters(*item) for item in value))
        if kind is constants.BRANCH:
            return self._bounded(chain.from_iterable(self.of_sequence(branch, whole=False) for branch in value[1]))
        if kind is constants.SUBPATTERN:
            return self.of_sequence(value[-1], whole=False)
        if kind in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            return self._repeated(*value)
        raise UnknownPattern

    def _characters(self, kind: Any, value: Any) -> Iterable[str]:
        if kind is constants.LITERAL:
            return (chr(value),)
        if kind is constants.RANGE:
            return map(chr, range(value[0], value[1] + 1))
        raise UnknownPattern

    def _repeated(self, least: int, most: int, parts: Iterable[Any]) -> set[str]:
        if not most:
            return {""}
        once = self.of_sequence(parts, whole=False)
        texts = {""}
        all_texts = set(texts) if not least else set()
        for count in range(1, most + 1):
            before = texts
            texts = self._joined(texts, once)
            if texts == before:  # further repetitions of empty texts change nothing
                return all_texts | texts
            if count >= least:
                self._budget.spend(len(texts))
                all_texts |= texts
        return self._bounded(all_texts)

    def _joined(self, firsts: set[str], seconds: set[str]) -> set[str]:
        return self._bounded(first + second for first in firsts for second in seconds)

    def _bounded(self, texts: Iterable[str]) -> set[str]:
        """Raises UnknownPattern once there are more texts, or longer ones, than names: later parts only add to both."""
        bounded = set()
        for text in texts:
            self._budget.spend_chars(len(text))
            bounded.add(text)
            if len(text) > self._longest or len(bounded) > max(1, len(self._names)):
                raise UnknownPattern
        return bounded
