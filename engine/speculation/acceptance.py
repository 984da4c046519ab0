"""How often the drafts of a sequence are right."""

from __future__ import annotations

import math
from array import array

_KEEP = 0.85  # weight of a sequence's earlier drafts after each new one: about 6 count
_KEEP_OF_ALL = 0.99  # weight of all earlier drafts: about 100 count
_FIRST_RATE = 0.6  # initial ``rate`` of a node
_FIRST_HITS = 0.5  # initial ``hits`` of a node
_LEAST_PROBABILITY = 0.1  # a draft with a lower probability is not proposed, whatever its cost
_LEAST_HITS = 0.1  # one probe that finds drafts exceeds it
_PROBE_EVERY = 8  # output tokens


class Acceptance:
    """The recent drafts of one sequence, or of all.

    While its drafts are not worth their time, a *probe* now and then finds out whether they would be: drafts that no
    step verifies are compared with the tokens that follow.
    """

    def __init__(self, most: int, of_all: Acceptance | None = None, *, sure: bool = False) -> None:
        """``most``: drafts in one step. A sequence begins with the acceptance ``of_all``.

        A ``sure`` source has drafts whenever it is asked.
        """
        self._most = most
        self._of_all = of_all
        self._sure = sure
        self._keep = _KEEP_OF_ALL if of_all is None else _KEEP
        self.rate: float = _FIRST_RATE if of_all is None else of_all.rate  # P(draft right | earlier ones right)
        self.hits: float = _FIRST_HITS if of_all is None else of_all.hits  # share of steps in which a source has drafts
        if sure:
            self.hits = 1.0
        self._probe: tuple[int, tuple[int, ...]] = (0, ())  # number of tokens before the drafts, drafts
        self._next_probe = 0  # number of tokens

    def proposed(self, drafts: tuple[int, ...]) -> None:
        """Count whether there are drafts."""
        if self._sure:
            return
        self.hits = self._keep * self.hits + (1.0 - self._keep) * bool(drafts)
        if self._of_all is not None:
            self._of_all.proposed(drafts)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count drafts of a step: the accepted ones, and the first wrong one if there is one."""
        wrong = self._keep**num_accepted * (1.0 - self.rate)  # the mean after the accepted ones
        if num_accepted < num_drafts:
            wrong = self._keep * wrong + (1.0 - self._keep)
        self.rate = 1.0 - wrong
        if self._of_all is not None:
            self._of_all.count(num_drafts, num_accepted)

    @property
    def expected(self) -> float:
        """Mean number of accepted drafts of a step that may have some."""
        return self.hits * self.gain(self._most)

    def gain(self, num_drafts: int) -> float:
        """Return how many of ``num_drafts`` drafts are accepted on average."""
        rate = self.rate
        gain = 0.0
        for _ in range(num_drafts):  # rate + rate² + …
            gain = rate * (1.0 + gain)
        return gain

    def worth(self, least: float, most: int) -> int:
        """Return how many drafts, up to ``most``, are right with a probability above ``least``.

        A source that hardly ever has drafts is not asked each time.
        """
        least = max(least, _LEAST_PROBABILITY)
        if self.hits < _LEAST_HITS:
            return 0
        if self.rate**most > least:
            return most
        return 0 if self.rate <= least else math.ceil(math.log(least) / math.log(self.rate)) - 1

    def probe_due(self, num_tokens: int) -> bool:
        """Return whether to probe a text of ``num_tokens``."""
        return num_tokens >= self._next_probe

    def probe(self, token_ids: array[int], drafts: tuple[int, ...]) -> None:
        """Count the drafts of the last probe, and remember new ones, which follow ``token_ids``."""
        begin, last = self._probe
        num_right = 0
        while num_right < len(last) and last[num_right] == token_ids[begin + num_right]:
            num_right += 1
        self.count(len(last), num_right)
        self.proposed(drafts)
        self._probe = (len(token_ids), drafts)
        self._next_probe = len(token_ids) + max(_PROBE_EVERY, len(drafts))
