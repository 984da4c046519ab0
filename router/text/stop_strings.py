"""Stop strings in a stream: holds back a possible beginning of one, and cuts before the first complete one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The joined results do not depend on how the text was split.

    The stop string that is complete first wins; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string ended it; then no push may follow."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        end = len(text) - partial_match(text, self._stops)
        self._held = text[end:]
        return text[:end], False

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held


def partial_match(text: str, patterns: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is the beginning of a pattern."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(pattern) - 1, len(text)), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest
