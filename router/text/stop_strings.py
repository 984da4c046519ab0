"""Stop strings in a stream: holds back a possible beginning of one, and cuts before the first complete one.

Each stop string is matched by the algorithm of Knuth, Morris and Pratt: the time is linear in the length of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request with their failure tables, which all its choices share.

    ``included``: a stop string or stop token is the end of the text, instead of not belonging to it.
    """

    def __init__(self, stops: Sequence[str] = (), included: bool = False) -> None:
        self.included = included
        self.patterns = [(stop, failure_table(stop)) for stop in stops]
        self.first_letters = frozenset(stop[0] for stop in stops)


def failure_table(stop: str) -> array[int]:
    """Return how many characters still match where the next one differs, by the number matched before; -1: none.

    That next one differs from the character that failed, so a failure takes O(log(len(stop))) steps.
    """
    table = array("h", [-1])
    border = 0  # length of the longest proper suffix of stop[:length] that begins the stop string
    for length in range(1, len(stop)):
        letter = stop[length]
        table.append(table[border] if letter == stop[border] else border)
        while border >= 0 and letter != stop[border]:
            border = table[border]
        border += 1
    return table


class StopMatcher:
    """Matches one choice. The joined results do not depend on how the text was split.

    The stop string that is complete first wins; of those that end together, the longest. ``found`` is that one.
    """

    __slots__ = ("_first_letters", "_held", "_included", "_matched", "_patterns", "found")

    def __init__(self, stops: StopStrings) -> None:
        self._patterns = stops.patterns
        self._first_letters = stops.first_letters
        self._included = stops.included
        self._matched = [0] * len(stops.patterns)  # characters of each stop string at the end of the text
        self._held = ""
        self.found = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string ended it; then no push may follow."""
        if not self._patterns or (not self._held and self._first_letters.isdisjoint(text)):
            return text, False
        end, stop_length = self._scan(text)
        text = self._held + text
        if stop_length:
            end += len(self._held)
            self.found = text[end - stop_length : end]
            return text[: end if self._included else end - stop_length], True
        end = len(text) - max(self._matched)
        self._held = text[end:]
        return text[:end], False

    def _scan(self, text: str) -> tuple[int, int]:
        """Return the end and the length of the first complete stop string; the length is 0 if there is none."""
        matched = self._matched
        for end, letter in enumerate(text, 1):
            longest = 0
            for index, (stop, failures) in enumerate(self._patterns):
                length = matched[index]
                while length >= 0 and stop[length] != letter:
                    length = failures[length]
                length += 1
                matched[index] = length
                if length == len(stop):
                    longest = max(longest, length)
            if longest:
                return end, longest
        return len(text), 0

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
