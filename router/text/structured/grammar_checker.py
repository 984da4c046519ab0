"""Whether grammars compile, asked of a process of its own (worker.py) that is started with the first question."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable

from pdserve.errors import Overloaded, RequestError
from pdserve.grammar import MAX_BYTES, check_size
from router.text.structured.output_formats import Wanted

COMPILE_SECONDS = 5.0
_START_SECONDS = 60.0  # a large vocabulary takes one or two
_MAX_WAITING = 64
_KEPT = 256  # answers


class GrammarChecker:
    """One question at a time; answers are kept."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._tokenizer_json = tokenizer_json
        self._process: Process | None = None
        self._known: OrderedDict[str, str] = OrderedDict()  # by grammar: what is wrong with it
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def check(self, wanted: Wanted) -> None:
        """Raises RequestError that names the field and what is wrong or not supported; Overloaded where many wait."""
        if not wanted.grammar:
            return
        problem = self._known.get(wanted.grammar)
        if problem is None:
            problem = await self._ask_in_turn(wanted)
        self._known.move_to_end(wanted.grammar)
        if problem:
            raise RequestError(f"{wanted.field}: {problem}", wanted.field)

    async def close(self) -> None:
        """Stop the worker. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask_in_turn(self, wanted: Wanted) -> str:
        try:
            check_size(wanted.grammar)
        except RequestError as exc:
            raise RequestError(f"{wanted.field}: {exc}", wanted.field) from exc
        if self._waiting >= _MAX_WAITING:
            raise Overloaded(f"{self._waiting} grammars wait to be compiled; try again shortly")
        self._waiting += 1
        try:
            async with self._turn:
                if wanted.grammar not in self._known:
                    self._known[wanted.grammar] = await self._ask(wanted.grammar)
                    if len(self._known) > _KEPT:
                        self._known.popitem(last=False)
                return self._known[wanted.grammar]
        finally:
            self._waiting -= 1

    async def _ask(self, grammar: str) -> str:
        try:
            process = self._process or await self._start()
        except (OSError, EOFError, TimeoutError) as exc:
            await self.close()
            raise Overloaded("the router cannot compile grammars at present; its log may say why") from exc
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await _exchange(process, grammar)
        except TimeoutError:
            problem = f"it takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        except (OSError, EOFError):
            problem = "it takes too much memory to compile; simplify it"
        except asyncio.CancelledError:  # an answer that comes later would be taken for another's
            await self.close()
            raise
        await self.close()
        return problem

    async def _start(self) -> Process:
        """Raises RequestError when grammars cannot be used with the model's tokenizer."""
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
    except RuntimeError as exc:  # uvloop's, where the process has ended
        raise EOFError from exc
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    return str(json.loads(line))
