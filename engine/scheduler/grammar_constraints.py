"""Requests and choices that have to follow a grammar: who waits for what of engine/scheduler/grammar_workers.py.

    submitted ──compiled──► queued …  a choice: mask there ──planned──► token drawn ──applied──► next mask there ──► …
                                                           └─ not scheduled again until then ──┘

A choice is scheduled only when the mask of its next token is there, so never while its last token is in flight; all
others run ahead meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.request import Constraint, Request
from engine.request import Sequence as Choice
from engine.scheduler.grammar_workers import Advance, Compiled, GrammarWorkers
from pdserve.errors import RequestError
from pdserve.grammar import Grammar, without

PATIENCE = 2e-3  # seconds that planning a step waits for masks that are under way: most take less


class GrammarConstraints:
    """Of one scheduler. ``grammars`` may be None where no request has a grammar."""

    def __init__(self, grammars: GrammarWorkers | None, eos_token_ids: Collection[int]) -> None:
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._compiling: dict[str, list[Request]] = {}  # by grammar: whose requests wait for it
        self._choices: dict[Constraint, Choice] = {}  # whose next mask is being computed
        self._advances: list[Advance] = []  # to be asked for

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return sum(map(len, self._compiling.values()))

    def holds(self, request: Request) -> bool:
        """Whether a new request has to wait for its grammar; ``take`` returns it when that is there."""
        text = request.sampling.grammar
        if not text:
            return False
        assert self._grammars is not None
        request.grammar = self._grammars.find(text)
        if request.grammar is not None:
            return False
        if text not in self._compiling:
            self._compiling[text] = []
            self._grammars.compile(text)
        self._compiling[text].append(request)
        return True

    def forget(self, rid: int) -> None:
        """A request that waits for its grammar is not wanted any more. Unknown ones are ignored."""
        for requests in self._compiling.values():
            requests[:] = [request for request in requests if request.rid != rid]

    def begin(self, choice: Choice) -> None:
        """A new choice, with or without outputs so far."""
        grammar = choice.request.grammar
        if grammar is None:
            return
        if choice.num_outputs:
            choice.constraint = Constraint(grammar, None)
            self._advance(choice, choice.token_ids[choice.prompt_len :])
        else:
            mask, not_yet = grammar.first_mask, self._not_yet(choice)
            choice.constraint = Constraint(grammar, without(mask, not_yet) if not_yet else mask)

    def drawn(self, choice: Choice, num_tokens: int = 1) -> None:
        """A choice goes on behind its newest tokens."""
        if choice.constraint is not None:
            choice.constraint.mask = None
            self._advance(choice, choice.token_ids[-num_tokens:])

    def order(self) -> None:
        """Have the masks computed that follow what was said since the last call."""
        if self._advances:
            assert self._grammars is not None
            self._grammars.advance(self._advances)
            self._advances = []

    def take(self) -> tuple[list[Request], list[tuple[int, RequestError]]]:
        """Requests whose grammar has been compiled, and by rid those that their grammar has failed."""
        ready: list[Request] = []
        failed: list[tuple[int, RequestError]] = []
        for news in self._grammars.take_news(PATIENCE) if self._grammars is not None else ():
            if isinstance(news, Compiled):
                for request in self._compiling.pop(news.text, ()):
                    if isinstance(news.result, Grammar):
                        request.grammar = news.result
                        ready.append(request)
                    else:
                        failed.append((request.rid, news.result))
                continue
            choice = self._choices.pop(news.constraint)
            if isinstance(news.result, bytes):
                news.constraint.mask = news.result
            elif not choice.ended:
                failed.append((choice.request.rid, news.result))
        return ready, failed

    def _advance(self, choice: Choice, token_ids: Sequence[int]) -> None:
        assert choice.constraint is not None
        self._choices[choice.constraint] = choice
        self._advances.append(Advance(choice.constraint, token_ids, self._not_yet(choice)))

    def _not_yet(self, choice: Choice) -> frozenset[int]:
        """Tokens that would end it before ``min_tokens``."""
        sampling = choice.request.sampling
        if choice.num_outputs >= sampling.min_tokens:
            return frozenset()
        return self._eos_token_ids.union(sampling.stop_token_ids)
