"""Chat templates at work: in processes of their own, with an end to their time and memory.

    router ── Setup, then an Order per chat ──► renderer (render_process.py)
           ◄── Rendered, each ────────────────

A template comes with a checkpoint and runs over what clients write: it may loop without end, or fill the memory. In the
router it would hold up every stream; here it is ended, and only its own request fails.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.errors import NodeError, RequestError
from router.text.chat.template import ChatTemplate

RENDER_SECONDS = 5.0  # real templates take less than a millisecond for a message
MAX_MEMORY = 2 << 30  # bytes of address space
RENDERERS = 2
LENGTH_BYTES = 4  # little-endian, ahead of each message, which is JSON: it has integers of any size

_START_SECONDS = 60.0


class Setup(msgspec.Struct, frozen=True):
    """First message to a renderer, which answers with an empty Rendered."""

    source: str
    special_tokens: dict[str, str]
    max_memory: int


class Order(msgspec.Struct, frozen=True):
    """The arguments of ChatTemplate.render."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    continue_final_message: bool


class Rendered(msgspec.Struct, frozen=True):
    """A text, or why there is none, with the parameter at fault."""

    text: str = ""
    error: str = ""
    param: str | None = None


class Renderers:
    """Up to RENDERERS processes, started when they are needed. Those that were ended are replaced."""

    def __init__(self, template: ChatTemplate, seconds: float = RENDER_SECONDS, max_memory: int = MAX_MEMORY) -> None:
        self._setup = msgspec.json.encode(Setup(template.source, template.special_tokens, max_memory))
        self._seconds = seconds
        self._places = asyncio.Semaphore(RENDERERS)
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def render(self, order: Order) -> str:
        """Raises RequestError where the template refuses the messages, or does not come to an end with them."""
        data = msgspec.json.encode(order)
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                rendered = await self._ask_in_time(process, data)
            except BaseException:
                await self._end(process)
                raise
            self._idle.append(process)
        if rendered.error:
            raise RequestError(rendered.error, rendered.param)
        return rendered.text

    async def _ask_in_time(self, process: Process, data: bytes) -> Rendered:
        try:
            async with asyncio.timeout(self._seconds):
                return await _ask(process, data)
        except TimeoutError as exc:
            text = f"the chat template does not come to an end with these messages within {self._seconds:g} s"
            raise RequestError(f"{text}; send fewer or shorter ones", "messages") from exc
        except (EOFError, OSError) as exc:
            raise RequestError("the chat template ended its process with these messages", "messages") from exc

    async def close(self) -> None:
        for process in list(self._all):
            await self._end(process)

    async def _start(self) -> Process:
        argv = [sys.executable, "-m", "router.text.chat.render_process"]
        process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, limit=1 << 20)
        self._all.add(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _ask(process, self._setup)
        except (TimeoutError, EOFError, OSError) as exc:
            await self._end(process)
            raise NodeError("the router cannot start a process for chat templates; its log says why") from exc
        return process

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ask(process: Process, data: bytes) -> Rendered:
    """Raises EOFError or OSError when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
    return msgspec.json.decode(await process.stdout.readexactly(length), type=Rendered)
