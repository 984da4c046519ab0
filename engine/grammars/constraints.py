"""Tracks which requests and choices wait for results of engine/grammars/workers.py, and applies token rules.

    submitted ──compiled──► queued …  a choice: mask ready ──planned──► token sampled ──applied──► next mask ready ──► …
                                                          └─ not scheduled again until then ───┘

A choice is scheduled only when the mask of its next token is ready, so never while its last token is in flight. All
other sequences are scheduled meanwhile: no step waits for a mask. The masks of token rules alone (token_rules.py) are
ready at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from engine.grammars.workers import Advance, Compiled, GrammarWorkers
from engine.request import Request
from engine.sequence import Sequence
from engine.sequence_parts import Constraint
from engine.token_rules import ChoiceRules, TokenRules
from pdserve.errors import RequestError
from pdserve.grammar import Grammar, without


class GrammarConstraints:
    """The grammars and token rules of one scheduler. ``workers`` may be None if no request has a grammar."""

    def __init__(
        self,
        workers: GrammarWorkers | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        propose: Callable[[Sequence], tuple[int, ...]],
    ) -> None:
        """``propose`` returns drafts that may follow the tokens of a sequence."""
        self._workers = workers
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._compiling: dict[str, list[Request]] = {}  # by grammar: the requests that wait for it
        self._advancing: dict[Constraint, Sequence] = {}  # sequences whose next mask is being computed
        self._advances: list[Advance] = []  # not sent to the workers yet
        self._new_tokens: dict[Sequence, int] = {}  # numbers of new tokens, while no next mask is being computed
        self._propose = propose

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled."""
        return sum(map(len, self._compiling.values()))

    @property
    def compiling(self) -> Iterator[Request]:
        """Requests that wait for their grammar."""
        return chain.from_iterable(self._compiling.values())

    def holds(self, request: Request) -> bool:
        """Return whether a new request has to wait for its grammar; ``take_results`` returns it once that is ready."""
        text = request.sampling.grammar
        if not text:
            return False
        assert self._workers is not None
        request.grammar = self._workers.find(text)
        if request.grammar is not None:
            return False
        if text not in self._compiling:
            self._compiling[text] = []
            self._workers.compile(text, request.client)
        self._compiling[text].append(request)
        return True

    def held(self, rid: int) -> Request | None:
        """Return a request that waits for its grammar."""
        return next(
            (request for requests in self._compiling.values() for request in requests if request.rid == rid), None
        )

    def forget(self, rid: int) -> None:
        """Drop a request that waits for its grammar. Unknown rids are ignored."""
        for requests in self._compiling.values():
            requests[:] = [request for request in requests if request.rid != rid]

    def begin(self, sequence: Sequence) -> None:
        """Constrain a new sequence, which may have output already."""
        request = sequence.request
        if request.rules is None and request.sampling.has_token_rules:
            request.rules = TokenRules(request.sampling, self._vocab_size)
        grammar = request.grammar
        rules = request.rules
        if grammar is None and rules is None:
            return
        sequence.constraint = Constraint(grammar, None if rules is None else ChoiceRules(rules))
        if grammar is None or rules is not None or sequence.num_outputs:
            self._advance(sequence, sequence.token_ids[sequence.prompt_len :])
        else:
            mask = grammar.first_mask
            forbidden = self._forbidden(sequence)
            sequence.constraint.mask = without(mask, forbidden) if forbidden else mask

    def sampled(self, sequence: Sequence, num_tokens: int = 1) -> None:
        """Advance a sequence by its newest tokens."""
        if sequence.constraint is not None:
            sequence.constraint.mask = None
            self._new_tokens[sequence] = self._new_tokens.get(sequence, 0) + num_tokens

    def request_masks(self) -> None:
        """Send the advances since the last call to the workers."""
        new_tokens = self._new_tokens
        self._new_tokens = {}
        for sequence, num_tokens in new_tokens.items():
            if not sequence.ended:
                self._advance(sequence, sequence.token_ids[-num_tokens:])
        if self._advances:
            assert self._workers is not None
            self._workers.advance(self._advances)
            self._advances = []

    def take_results(self) -> tuple[list[Request], list[tuple[int, RequestError]]]:
        """Apply the results that are ready. Return requests whose grammar was compiled, and errors by rid."""
        ready: list[Request] = []
        failed: list[tuple[int, RequestError]] = []
        for answer in self._workers.take_results() if self._workers is not None else ():
            if isinstance(answer, Compiled):
                for request in self._compiling.pop(answer.text, ()):
                    if isinstance(answer.result, Grammar):
                        request.grammar = answer.result
                        ready.append(request)
                    else:
                        failed.append((request.rid, answer.result))
                continue
            sequence = self._advancing.pop(answer.constraint)
            if isinstance(answer.result, bytes):
                answer.constraint.mask = answer.result
                answer.constraint.later = answer.later
                answer.constraint.drafts = answer.constraint.drafts[: len(answer.later)]
            elif not sequence.ended:
                failed.append((sequence.request.rid, answer.result))
        return ready, failed

    def _advance(self, sequence: Sequence, token_ids: array[int]) -> None:
        constraint = sequence.constraint
        assert constraint is not None
        rules = constraint.rules
        forbidden = self._forbidden(sequence)
        allowed: tuple[bytes, ...] = ()
        if rules is not None:
            allowed = rules.masks(sequence.token_ids, sequence.prompt_len, forbidden)
            if constraint.grammar is None:
                constraint.mask = allowed[0]
                constraint.fixed = rules.always_fixed and not forbidden
                return
        self._advancing[constraint] = sequence
        constraint.drafts = () if rules is not None else self._propose(sequence)
        self._advances.append(
            Advance(
                sequence.request.client,
                constraint,
                token_ids,
                forbidden,
                allowed,
                drafts=constraint.drafts,
                num_forbidden=sequence.request.sampling.min_tokens - sequence.num_outputs,
            )
        )

    def _forbidden(self, sequence: Sequence) -> frozenset[int]:
        """Return the tokens that would end a sequence before ``min_tokens``."""
        sampling = sequence.request.sampling
        if sequence.num_outputs >= sampling.min_tokens:
            return frozenset()
        return self._eos_token_ids.union(sampling.stop_token_ids)
