"""Checks that grammars compile, in a separate process (grammar_worker.py) that starts with the first grammar."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable

from pdserve.errors import Overloaded, RequestError
from pdserve.grammar import MAX_BYTES, check_size
from router.text.structured.structured_outputs import OutputGrammar

COMPILE_SECONDS = 5.0
_START_SECONDS = 60.0  # a large vocabulary takes one or two
_MAX_WAITING = 64
_MAX_CACHED = 256  # results


class GrammarChecker:
    """Compiles one grammar at a time and caches the results."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._tokenizer_json = tokenizer_json
        self._process: Process | None = None
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
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _compile_once(self, grammar: OutputGrammar) -> str:
        try:
            check_size(grammar.text)
        except RequestError as exc:
            raise RequestError(f"{grammar.field}: {exc}", grammar.field) from exc
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
            process = self._process or await self._start()
        except (OSError, EOFError, TimeoutError) as exc:
            await self.close()
            raise Overloaded("the router cannot start its grammar compiler; try again shortly") from exc
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await _exchange(process, text)
        except TimeoutError:
            problem = f"it takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        except (OSError, EOFError):
            problem = "it takes too much memory to compile; simplify it"
        except asyncio.CancelledError:  # its late answer would be taken for the next grammar's
            await self.close()
            raise
        await self.close()
        return problem

    async def _start(self) -> Process:
        """Raises RequestError when the model's tokenizer does not support grammars."""
        argv = (sys.executable, "-P", "-m", "router.text.structured.grammar_worker")
        self._process = await asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=2 * MAX_BYTES
        )
        async with asyncio.timeout(_START_SECONDS):
            problem = await _exchange(self._process, self._tokenizer_json())
        if problem:
            await self.close()
            raise RequestError(problem)
        return self._process


async def _exchange(process: Process, text: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(text).encode() + b"\n")
    except RuntimeError as exc:  # uvloop raises it when the process has ended
        raise EOFError from exc
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    return str(json.loads(line))
