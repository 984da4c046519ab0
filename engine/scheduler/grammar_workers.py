"""Compiles grammars and computes masks, on threads beside the step loop.

    step loop ──compile──► compile thread ──┐
              ──masks────► mask threads ────┴─ news ─► step loop, woken, takes them

llguidance releases the GIL while it works. A mask takes some 30 µs, a step is not held up for it: what is not there in
time is left for a later step.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.request import Constraint
from pdserve.config.model_config import ModelConfig
from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, start_thread, without

COMPILE_SECONDS = 10.0  # after which whoever waits for a grammar is told that it takes too long
_MASK_THREADS = 2
_KEPT = 256  # grammars that were used last; a few MB where vocabularies are large


@dataclass(frozen=True, slots=True)
class Advance:
    """A constraint whose choice has gone on with ``token_ids``. ``not_yet`` may not follow: min_tokens forbids them."""

    constraint: Constraint
    token_ids: Sequence[int]
    not_yet: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Compiled:
    text: str
    result: Grammar | RequestError


@dataclass(frozen=True, slots=True)
class Masked:
    constraint: Constraint
    result: bytes | RequestError


News = Compiled | Masked


class GrammarWorkers:
    """Used by the step loop alone. ``wake`` is called on other threads when there is news."""

    def __init__(self, model_dir: str, model: ModelConfig, wake: Callable[[], None]) -> None:
        self._model_dir, self._model = model_dir, model
        self._wake = wake
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._timers: dict[str, threading.Timer] = {}
        self._vocabulary: GrammarVocabulary | RequestError | None = None
        self._to_compile: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._to_mask: queue.SimpleQueue[list[Advance]] = queue.SimpleQueue()
        self._threads_run = False
        self._news: deque[News] = deque()
        self._expected = 0  # masks that have been asked for since the last look
        self._arrived = threading.Condition()

    def load(self) -> None:
        """Make the vocabulary now, while no step has to wait for the GIL; else the first grammar does."""
        if self._vocabulary is None:
            try:
                self._vocabulary = _load_vocabulary(Path(self._model_dir), self._model)
            except RequestError as exc:
                self._vocabulary = exc

    def find(self, text: str) -> Grammar | None:
        """One that has been compiled lately."""
        grammar = self._known.get(text)
        if grammar is not None:
            self._known.move_to_end(text)
        return grammar

    def compile(self, text: str) -> None:
        """Compile a grammar: a Compiled will be among the news, an error after COMPILE_SECONDS at the latest."""
        self._start_threads()
        late = RequestError(f"the grammar takes more than {COMPILE_SECONDS:g} s to compile; simplify it", "grammar")
        timer = self._timers[text] = threading.Timer(COMPILE_SECONDS, self._tell, ([Compiled(text, late)],))
        timer.daemon = True
        timer.start()
        self._to_compile.put(text)

    def advance(self, steps: Sequence[Advance]) -> None:
        """Compute the masks that follow: a Masked for each will be among the news."""
        self._start_threads()
        self._expected += len(steps)
        share = -(-len(steps) // _MASK_THREADS)
        for start in range(0, len(steps), share):
            self._to_mask.put(list(steps[start : start + share]))

    def take_news(self, patience: float) -> list[News]:
        """What has been done. Waits up to ``patience`` seconds for masks that were asked for since the last call."""
        with self._arrived:
            if self._expected:
                self._arrived.wait_for(lambda: len(self._news) >= self._expected, patience)
            self._expected = 0
            news, self._news = list(self._news), deque()
        for item in news:
            if isinstance(item, Compiled):
                self._compiled(item)
        return news

    def _compiled(self, item: Compiled) -> None:
        timer = self._timers.pop(item.text, None)
        if timer is not None:
            timer.cancel()
        if isinstance(item.result, Grammar):
            self._known[item.text] = item.result
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)

    # ------------------------------------------------------------ on threads

    def _start_threads(self) -> None:
        if not self._threads_run:
            self._threads_run = True
            start_thread(self._compile_all, "grammars")
            for number in range(_MASK_THREADS):
                start_thread(self._mask_all, f"masks {number}")

    def _compile_all(self) -> None:
        while True:
            text = self._to_compile.get()
            self._tell([Compiled(text, self._compile(text))])

    def _compile(self, text: str) -> Grammar | RequestError:
        self.load()
        if isinstance(self._vocabulary, RequestError):
            return self._vocabulary
        assert self._vocabulary is not None
        try:
            return Grammar(text, self._vocabulary)
        except RequestError as exc:
            return exc
        except BaseException as exc:  # a panic in Rust is none of Exception's; this thread goes on
            return RequestError(f"the grammar cannot be compiled: {exc}", "grammar")

    def _mask_all(self) -> None:
        while True:
            self._tell([_masked(step) for step in self._to_mask.get()])

    def _tell(self, news: Sequence[News]) -> None:
        with self._arrived:
            self._news += news
            self._arrived.notify_all()
        self._wake()


def _masked(step: Advance) -> Masked:
    constraint = step.constraint
    try:
        if constraint.matcher is None:
            constraint.matcher = constraint.grammar.matcher()
        constraint.matcher.consume(step.token_ids)
        mask = constraint.matcher.mask()
        return Masked(constraint, without(mask, step.not_yet) if step.not_yet else mask)
    except RequestError as exc:
        return Masked(constraint, exc)
    except BaseException as exc:  # a panic in Rust is none of Exception's; this thread goes on
        return Masked(constraint, RequestError(f"the grammar cannot go on: {exc}", "grammar"))


def _load_vocabulary(model_dir: Path, model: ModelConfig) -> GrammarVocabulary:
    """Raises RequestError where the checkpoint has no tokenizer that grammars can be compiled against."""
    path = model_dir / "tokenizer.json"
    if not model.eos_token_ids:
        raise RequestError("the model has no end-of-sequence token to end a grammar with; leave it out", "grammar")
    try:
        return GrammarVocabulary(path.read_text(encoding="utf-8"), model.vocab_size, model.eos_token_ids)
    except (OSError, ValueError) as exc:
        reason = " ".join(str(exc).split())
        raise RequestError(f"the node's {path.name} cannot be used for grammars: {reason}", "grammar") from exc
