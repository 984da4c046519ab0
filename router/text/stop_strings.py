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
        cut = self._find(text)
        if cut is not None:
            self._held = ""
            return text[:cut], True
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_prefix(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
