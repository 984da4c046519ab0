"""Translates EBNF, and checks that grammars compile: in separate processes, started with the first grammars.

router ── the tokenizer's JSON, then GrammarQuestion ──► grammar_worker.py
       ◄── GrammarAnswer for each ──────────────────────
"""

from __future__ import annotations

from asyncio.subprocess import DEVNULL
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from pdserve.errors import Overloaded, RequestError
from router.text.fair_slots import CLIENT
from router.text.structured.conversion import Conversion, Conversions
from router.text.structured.structured_outputs import OutputGrammar
from router.text.worker_process import WorkerPool, WorkerProcess

COMPILE_SECONDS = 5.0
_WORKERS = 2  # processes; a client gets at most one
_MAX_WAITING = 64  # waiting grammars per client
_MAX_CACHED = 256  # results


class GrammarQuestion(msgspec.Struct, frozen=True):
    """A grammar to compile, or EBNF to translate."""

    text: str
    is_ebnf: bool


class GrammarAnswer(msgspec.Struct, frozen=True):
    """The result for one grammar: ``problem`` is empty if it compiles; ``text`` is translated EBNF."""

    problem: str = ""
    text: str = ""


class GrammarChecker:
    """Answers of the worker processes, with a cache."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._tokenizer_json = tokenizer_json
        self._workers = WorkerPool(self._start, _WORKERS)
        self._conversions = Conversions()
        self._answers: OrderedDict[GrammarQuestion, GrammarAnswer] = OrderedDict()
        self._waiting = Counter[str]()  # waiting grammars by client

    def conversion(self) -> Conversion:
        """Begin the conversion of a request's structure to grammars."""
        return self._conversions.begin()

    async def translated(self, grammar: OutputGrammar) -> OutputGrammar:
        """Translate EBNF to Lark; return other grammars. Raises the errors of ``check``."""
        return OutputGrammar(await self._answer(grammar), grammar.field) if grammar.is_ebnf else grammar

    async def check(self, grammar: OutputGrammar) -> None:
        """Raises RequestError that names the field and the problem; Overloaded when too many grammars wait."""
        if grammar.text:
            await self._answer(grammar)

    async def close(self) -> None:
        """Stop the workers and the thread. Idempotent."""
        self._conversions.close()
        await self._workers.close()

    async def _answer(self, grammar: OutputGrammar) -> str:
        grammar.check_size()
        question = GrammarQuestion(grammar.text, grammar.is_ebnf)
        if question not in self._answers:
            await self._ask_in_turn(question)
        self._answers.move_to_end(question)
        answer = self._answers[question]
        if answer.problem:
            raise RequestError(f"{grammar.field}: {answer.problem}", grammar.field)
        return answer.text

    async def _ask_in_turn(self, question: GrammarQuestion) -> None:
        client = CLIENT.get()
        if (waiting := self._waiting[client]) >= _MAX_WAITING:
            text = f"{waiting} grammars of this client wait to be compiled, the limit is {_MAX_WAITING}"
            raise Overloaded(f"{text}; try again shortly")
        self._waiting[client] += 1
        try:
            await self._ask(question)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    async def _ask(self, question: GrammarQuestion) -> None:
        try:
            async with self._workers.worker() as worker:
                if question in self._answers:  # another request has asked meanwhile
                    return
                answer = await worker.exchange(msgspec.json.encode(question), COMPILE_SECONDS)
            self._remember(question, msgspec.json.decode(answer, type=GrammarAnswer))
        except TimeoutError:
            problem = f"it takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
            self._remember(question, GrammarAnswer(problem))
        except (OSError, EOFError):
            self._remember(question, GrammarAnswer("it takes too much memory to compile; simplify it"))

    def _remember(self, question: GrammarQuestion, answer: GrammarAnswer) -> None:
        self._answers[question] = answer
        if len(self._answers) > _MAX_CACHED:
            self._answers.popitem(last=False)

    async def _start(self) -> WorkerProcess:
        """Raises RequestError when the model's tokenizer does not support grammars."""
        setup = self._tokenizer_json().encode()
        try:
            worker, problem = await WorkerProcess.start("router.text.structured.grammar_worker", setup, DEVNULL)
        except (OSError, EOFError, TimeoutError) as exc:
            raise Overloaded("the router cannot start its grammar compiler; try again shortly") from exc
        if problem:
            await worker.kill()
            raise RequestError(problem.decode())
        return worker
