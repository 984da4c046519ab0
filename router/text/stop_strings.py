"""Stop strings in a stream: hold back what may yet become one, cut exactly before the first that is complete."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feeds on text in pieces of any size; what it lets through does not depend on how the text was cut up.

    Of several stop strings the one that is complete first wins, of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string has been found; after that push no more."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        cut = self._find(text)
        if cut is not None:
            self._held = ""
            return text[:cut], True
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
