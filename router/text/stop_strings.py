"""Stop strings in a stream: holds back a possible beginning of one, and cuts before the first complete one.

All stop strings of a request are one automaton of Aho and Corasick: the time is linear in the length of the text,
whatever the number of stop strings.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

_MANY_CHARS = 4096  # larger automata are built on a thread; a character takes about 1 µs
_NO_LETTER = "\ud800"  # letter of a state that state + 1 does not continue: a surrogate, which no text has


class Advanced(NamedTuple):
    """The state after a text, or after the first complete stop string in it."""

    state: int
    end: int  # characters up to the end of that stop string
    stop_length: int  # characters of the stop string; 0: none


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
        letters = [_NO_LETTER]
        for stop in stops:
            self._add(stop, letters)
        self._letters = "".join(letters)
        self._shorter = array("I", [0]) * len(letters)
        self._link()

    def _add(self, stop: str, letters: list[str]) -> None:
        """Add states. ``letters`` has the characters of states that go on."""
        state = at = 0
        while at < len(stop):
            letter = stop[at]
            child = state + 1 if letters[state] == letter else self._branches.get(state, {}).get(letter, 0)
            if not child:
                break
            state = child
            at += 1
        if at == len(stop):
            self.complete[state] = at
            return
        if letters[state] != _NO_LETTER or state + 1 != len(letters):  # another stop string has state + 1
            self._branches.setdefault(state, {})[stop[at]] = len(letters)
        else:
            letters[state] = stop[at]
        letters += [*stop[at + 1 :], _NO_LETTER]
        self.lengths.extend(range(at + 1, len(stop) + 1))
        self.complete.extend([0] * (len(stop) - at - 1) + [len(stop)])

    def _link(self) -> None:
        """Find the next shorter state of each, from short to long ones."""
        states = [0]
        for state in states:
            children = dict(self._branches.get(state, {}))
            if self._letters[state] != _NO_LETTER:
                children[self._letters[state]] = state + 1
            for letter, child in children.items():
                if state:
                    self._shorter[child] = self.advance(self._shorter[state], letter).state
                self.complete[child] = self.complete[child] or self.complete[self._shorter[child]]
                states.append(child)

    def advance(self, state: int, text: str, may_stop: bool = True) -> Advanced:
        """Read ``text`` in ``state``, up to the first complete stop string if the text ``may_stop``."""
        letters = self._letters
        branches = self._branches
        shorter = self._shorter
        complete = self.complete
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
            if may_stop and complete[state]:
                return Advanced(state, end, complete[state])
        while letters[state] == _NO_LETTER and state not in branches and state:  # a complete stop string without effect
            state = shorter[state]
        return Advanced(state, len(text), 0)


async def build_stop_strings(stops: Sequence[str], included: bool) -> StopStrings:
    """Build the automaton without delaying other requests."""
    if sum(map(len, stops)) <= _MANY_CHARS:
        return StopStrings(stops, included)
    return await asyncio.to_thread(StopStrings, stops, included)


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

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string ended it; then no push may follow.

        Without ``may_stop``, stop strings that are complete in this text do not count.
        """
        stops = self._stops
        if not self._held and stops.first_letters.isdisjoint(text):
            return text, False
        self._state, end, stop_length = stops.advance(self._state, text, may_stop)
        end += len(self._held)
        text = self._held + text
        if stop_length:
            self.found = text[end - stop_length : end]
            return text[: end if stops.included else end - stop_length], True
        end -= stops.lengths[self._state]
        self._held = text[end:]
        return text[:end], False

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held = self._held
        self._held = ""
        return held


class Reasoned(Protocol):
    """Reads an output, and finds the end of its reasoning. An output parser is one."""

    @property
    def num_reasoned(self) -> int: ...

    @property
    def reasoning_end(self) -> int | None: ...

    def push(self, text: str) -> object: ...


class LateStopMatcher(StopMatcher):
    """Matches behind the reasoning of an output only, which ``reader`` finds. Text of the reasoning passes at once."""

    __slots__ = ("_num_passed", "_reader", "_waiting")

    def __init__(self, stops: StopStrings, reader: Reasoned) -> None:
        super().__init__(stops)
        self._reader: Reasoned | None = reader
        self._num_passed = 0  # characters of reasoning
        self._waiting: list[str] = []  # text that may be reasoning

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        reader = self._reader
        if reader is None:
            return super().push(text, may_stop)
        reader.push(text)
        self._waiting.append(text)
        num_new = reader.num_reasoned - self._num_passed
        if num_new <= 0 and reader.reasoning_end is None:
            return "", False
        waiting = "".join(self._waiting)
        reasoned = waiting[:num_new]
        rest = waiting[num_new:]
        if reader.reasoning_end is None:
            self._num_passed += num_new
            self._waiting = [rest]
            return reasoned, False
        self._reader = None
        self._waiting = []
        answer, stopped = super().push(rest, may_stop)
        return reasoned + answer, stopped

    def flush(self) -> str:
        return "".join(self._waiting) + super().flush()


def partial_match(text: str, patterns: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is the beginning of a pattern."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(pattern) - 1, len(text)), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest
