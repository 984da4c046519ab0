"""Checks that grammars compile, in a separate process (grammar_worker.py) that starts with the first grammar."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL
from collections import OrderedDict
from collections.abc import Callable

from pdserve.errors import Overloaded, RequestError
from router.text.structured.structured_outputs import OutputGrammar
from router.text.worker_process import WorkerProcess

COMPILE_SECONDS = 5.0
_MAX_WAITING = 64
_MAX_CACHED = 256  # results


class GrammarChecker:
    """Compiles one grammar at a time and caches the results."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._tokenizer_json = tokenizer_json
        self._worker: WorkerProcess | None = None
        self._problems: OrderedDict[str, str] = OrderedDict()  # grammar → what is wrong with it
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def check(self, grammar: OutputGrammar) -> None:
        """Raises RequestError that names the field and the problem; Overloaded when too many grammars wait."""
        if not grammar.text:
            return
        problem = self._problems.get(grammar.text)
        if problem is None:
            problem = await self._compile_once(grammar)
        self._problems.move_to_end(grammar.text)
        if problem:
            raise RequestError(f"{grammar.field}: {problem}", grammar.field)

    async def close(self) -> None:
        """Stop the worker. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()

    async def _compile_once(self, grammar: OutputGrammar) -> str:
        grammar.check_size()
        if self._waiting >= _MAX_WAITING:
            raise Overloaded(
                f"{self._waiting} grammars wait to be compiled, the limit is {_MAX_WAITING}; try again shortly"
            )
        self._waiting += 1
        try:
            async with self._lock:
                if grammar.text not in self._problems:
                    self._problems[grammar.text] = await self._compile(grammar.text)
                    if len(self._problems) > _MAX_CACHED:
                        self._problems.popitem(last=False)
                return self._problems[grammar.text]
        finally:
            self._waiting -= 1

    async def _compile(self, text: str) -> str:
        try:
            worker = self._worker or await self._start()
        except (OSError, EOFError, TimeoutError) as exc:
            raise Overloaded("the router cannot start its grammar compiler; try again shortly") from exc
        try:
            return (await worker.exchange(text.encode(), COMPILE_SECONDS)).decode()
        except TimeoutError:
            problem = f"it takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        except (OSError, EOFError):
            problem = "it takes too much memory to compile; simplify it"
        except asyncio.CancelledError:  # its late answer would be taken for the next grammar's
            await self.close()
            raise
        await self.close()
        return problem

    async def _start(self) -> WorkerProcess:
        """Raises RequestError when the model's tokenizer does not support grammars."""
        setup = self._tokenizer_json().encode()
        self._worker, problem = await WorkerProcess.start("router.text.structured.grammar_worker", setup, DEVNULL)
        if problem:
            await self.close()
            raise RequestError(problem.decode())
        return self._worker
