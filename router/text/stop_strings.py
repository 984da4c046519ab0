"""Stop strings in a stream: holds back a possible beginning of one, and cuts before the first complete one.

All stop strings of a request are one automaton of Aho and Corasick: the time is linear in the length of the text,
whatever the number of stop strings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, as an automaton that all its choices share.

    A state is the longest beginning of a stop string at the end of a text; state 0 is the empty one. State s + 1 is
    state s with one more character, ``_letters[s]``. Where stop strings part, ``_branches`` has the others' states.
    Where the next character differs from all, ``_shorter`` is the next longest beginning at the end of the text.

    ``included``: a stop string or stop token is the end of the text, instead of not belonging to it.
    """

    def __init__(self, stops: Sequence[str] = (), included: bool = False) -> None:
        self.included = included
        self.first_letters = frozenset(stop[0] for stop in stops)
        self.lengths = array("I", [0])  # characters of each state
        self.complete = array("I", [0])  # characters of the longest stop string at the end of a state; 0: none
        self._branches: dict[int, dict[str, int]] = {}
        letters = [""]
        for stop in stops:
            self._add(stop, letters)
        self._letters = "".join(letter or "\0" for letter in letters)
        self._shorter = array("I", [0]) * len(letters)
        self._link()

    def _add(self, stop: str, letters: list[str]) -> None:
        """Add states. ``letters`` has the characters of states that go on."""
        state = at = 0
        while at < len(stop):
            letter = stop[at]
            child = state + 1 if letters[state] == letter else self._branches.get(state, {}).get(letter, 0)
            if not child or self.complete[state]:
                break
            state, at = child, at + 1
        if self.complete[state]:  # by another stop string, which is always complete earlier
            return
        if at == len(stop):
            self.complete[state] = at
            return
        if letters[state]:
            self._branches.setdefault(state, {})[stop[at]] = len(letters)
        else:
            letters[state] = stop[at]
        letters += [*stop[at + 1 :], ""]
        self.lengths.extend(range(at + 1, len(stop) + 1))
        self.complete.extend([0] * (len(stop) - at - 1) + [len(stop)])

    def _link(self) -> None:
        """Find the next shorter state of each, from short to long ones. A text does not go on after a complete one."""
        states = [0]
        for state in states:
            if self.complete[state] or len(self._letters) == 1:
                continue
            children = {self._letters[state]: state + 1, **self._branches.get(state, {})}
            for letter, child in children.items():
                if state:
                    self._shorter[child], _ = self.advance(self._shorter[state], letter)
                self.complete[child] = self.complete[child] or self.complete[self._shorter[child]]
                states.append(child)

    def advance(self, state: int, text: str) -> tuple[int, int]:
        """Return the state after ``text``, or after its first complete stop string, and the characters until there."""
        letters, branches, shorter, complete = self._letters, self._branches, self._shorter, self.complete
        for end, letter in enumerate(text, 1):
            while letters[state] != letter:
                if state in branches and letter in branches[state]:
                    state = branches[state][letter]
                    break
                if not state:
                    break
                state = shorter[state]
            else:
                state += 1
            if complete[state]:
                return state, end
        return state, len(text)


class StopMatcher:
    """Matches one choice. The joined results do not depend on how the text was split.

    The stop string that is complete first wins; of those that end together, the longest. ``found`` is that one.
    """

    __slots__ = ("_held", "_state", "_stops", "found")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.found = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string ended it; then no push may follow."""
        stops = self._stops
        if not self._held and stops.first_letters.isdisjoint(text):
            return text, False
        self._state, end = stops.advance(self._state, text)
        end += len(self._held)
        text = self._held + text
        if length := stops.complete[self._state]:
            self.found = text[end - length : end]
            return text[: end if stops.included else end - length], True
        end -= stops.lengths[self._state]
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
