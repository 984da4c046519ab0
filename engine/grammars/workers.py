"""Compiles grammars and computes token masks, on threads beside the step loop.

    step loop ──compile──► compile threads ──────┐
              ──advance──► mask threads ─────────┤
                            │ slow grammars      │
                            └► slow mask threads ┴─ results ─► step loop, which is woken and takes them

llguidance releases the GIL while it works. A mask takes about 30 µs; the step loop never waits for one. Masks of slow
grammars have threads of their own, so that the others do not wait behind them. These threads and the compile threads
are fair between clients.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.grammars.fair_jobs import FairJobs
from engine.sequence_parts import Constraint
from pdserve.checkpoint.files import MAX_TOKENIZER, read_text
from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, Matcher, intersection, start_thread, without
from pdserve.model.model_config import ModelConfig

COMPILE_SECONDS = 10.0  # seconds until requests that wait for a grammar fail
_MASK_THREADS = 2
_SLOW_THREADS = 2  # threads that compile, and as many for masks of slow grammars; a client gets one of each
_CACHED_GRAMMARS = 256  # most recently used; a few MB for large vocabularies


class Advance(NamedTuple):
    """New tokens of a constraint's choice. ``forbidden`` tokens may not follow, because of min_tokens.

    ``allowed`` are the masks of its token rules, if it has any: the first one that leaves a token holds. ``drafts`` may
    follow: the masks behind them are wanted, too, as far as the grammar allows them.
    """

    client: int
    constraint: Constraint
    token_ids: Sequence[int]
    forbidden: frozenset[int]
    allowed: Sequence[bytes] = ()
    drafts: tuple[int, ...] = ()
    num_forbidden: int = 1  # positions from the next one at which ``forbidden`` tokens may not follow


class Compiled(NamedTuple):
    text: str
    result: Grammar | RequestError


class Masked(NamedTuple):
    """The mask of a choice's next token, and those behind some of its drafts."""

    constraint: Constraint
    result: bytes | RequestError
    later: tuple[bytes, ...] = ()


class GrammarWorkers:
    """Used by the step loop alone. ``wake`` is called on other threads when results are ready."""

    def __init__(self, model_dir: str, model: ModelConfig, wake: Callable[[], None]) -> None:
        self._model_dir = model_dir
        self._model = model
        self._wake = wake
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._vocabulary: GrammarVocabulary | RequestError | None = None
        self._loading = threading.Lock()
        self._to_compile: FairJobs[str] | None = None  # None: no thread has been started
        self._to_mask: queue.SimpleQueue[list[Advance]] = queue.SimpleQueue()
        self._slow_masks: FairJobs[Advance] | None = None
        self._results: deque[Compiled | Masked] = deque()

    def load(self) -> None:
        """Build the vocabulary now, while no step waits for the GIL; otherwise the first grammar does."""
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = _load_vocabulary(Path(self._model_dir), self._model)

    def find(self, text: str) -> Grammar | None:
        """Return a compiled grammar from the cache."""
        grammar = self._cache.get(text)
        if grammar is not None:
            self._cache.move_to_end(text)
        return grammar

    def compile(self, text: str, client: int) -> None:
        """Compile a grammar. A Compiled follows among the results, with an error after COMPILE_SECONDS."""
        if self._to_compile is None:
            self._to_compile = FairJobs(_SLOW_THREADS, self._compile, "grammars")
            self._slow_masks = FairJobs(_SLOW_THREADS, self._mask, "slow masks")
            for number in range(_MASK_THREADS):
                start_thread(self._mask_all, f"masks {number}")
        self._to_compile.put(client, text)

    def advance(self, steps: Sequence[Advance]) -> None:
        """Compute the next masks of compiled grammars. A Masked for each follows among the results."""
        share = -(-len(steps) // _MASK_THREADS)
        for start in range(0, len(steps), share):
            self._to_mask.put(list(steps[start : start + share]))

    def take_results(self) -> list[Compiled | Masked]:
        """Return the results since the last call, without waiting for more."""
        results = [self._results.popleft() for _ in range(len(self._results))]
        for result in results:
            if isinstance(result, Compiled):
                self._store(result)
        return results

    def _store(self, compiled: Compiled) -> None:
        if isinstance(compiled.result, Grammar):
            self._cache[compiled.text] = compiled.result
            if len(self._cache) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)

    # ------------------------------------------------------------ on threads

    def _compile(self, text: str) -> None:
        late = RequestError(f"the grammar takes more than {COMPILE_SECONDS:g} s to compile; simplify it", "grammar")
        timer = threading.Timer(COMPILE_SECONDS, self._publish, ([Compiled(text, late)],))
        timer.daemon = True
        timer.start()
        compiled = Compiled(text, self._compiled(text))
        timer.cancel()
        self._publish([compiled])

    def _compiled(self, text: str) -> Grammar | RequestError:
        self.load()
        if isinstance(self._vocabulary, RequestError):
            return self._vocabulary
        assert self._vocabulary is not None
        try:
            return Grammar(text, self._vocabulary)
        except RequestError as exc:
            return exc
        except BaseException as exc:  # a panic in Rust is not an Exception; the thread must survive it
            return RequestError(f"the grammar cannot be compiled: {exc}", "grammar")

    def _mask_all(self) -> None:
        assert self._slow_masks is not None
        while True:
            masked = []
            for step in self._to_mask.get():
                if step.constraint.grammar is not None and step.constraint.grammar.slow:
                    self._slow_masks.put(step.client, step)
                else:
                    masked.append(_masked(step))
            self._publish(masked)

    def _mask(self, step: Advance) -> None:
        self._publish([_masked(step)])

    def _publish(self, results: Sequence[Compiled | Masked]) -> None:
        self._results.extend(results)
        self._wake()


def _masked(step: Advance) -> Masked:
    constraint = step.constraint
    try:
        matcher = constraint.begun_matcher()
        matcher.consume(step.token_ids)
        mask = matcher.mask()
        if step.allowed:
            mask = intersection(mask, step.allowed)
        if step.forbidden:
            mask = without(mask, step.forbidden)
        return Masked(constraint, mask, _masks_behind_drafts(step, matcher, mask) if step.drafts else ())
    except RequestError as exc:
        return Masked(constraint, exc)
    except BaseException as exc:  # a panic in Rust is not an Exception; the thread must survive it
        return Masked(constraint, RequestError(f"the grammar cannot go on: {exc}", "grammar"))


def _masks_behind_drafts(step: Advance, matcher: Matcher, mask: bytes) -> tuple[bytes, ...]:
    """Return the masks behind each draft, up to the first one that may not follow; ``mask`` is for the first."""
    masks: list[bytes] = []
    ahead = matcher.copy()
    for position, draft in enumerate(step.drafts, 1):
        if not mask[draft // 8] >> draft % 8 & 1:
            break
        ahead.consume((draft,))
        try:
            mask = ahead.mask()
        except RequestError:  # the text ends with this draft, or the grammar is too slow: the request fails later
            break
        if position < step.num_forbidden:
            mask = without(mask, step.forbidden)
        masks.append(mask)
    return tuple(masks)


def _load_vocabulary(model_dir: Path, model: ModelConfig) -> GrammarVocabulary | RequestError:
    """Return the tokenizer's vocabulary, or why no grammar can be compiled against it."""
    path = model_dir / "tokenizer.json"
    if not model.eos_token_ids:
        return RequestError("the model has no end-of-sequence token to end a grammar with; leave it out", "grammar")
    try:
        return GrammarVocabulary(read_text(path, MAX_TOKENIZER), model.vocab_size, model.eos_token_ids)
    except BaseException as exc:  # a panic in Rust is not an Exception
        reason = " ".join(str(exc).split())
        return RequestError(f"the node's {path.name} cannot be used for grammars: {reason}", "grammar")
