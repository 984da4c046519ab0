"""Chat template renderer: renders in separate processes, with limits on time and memory.

    router ── RendererConfig, then RenderRequest per chat ──► render_process.py
           ◄── RenderResult for each ───────────────────────

A template comes with the checkpoint and runs over client text: it may loop for ever or fill the memory. In the router
it would block every stream; here the process is killed and only its own request fails.
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
LENGTH_BYTES = 4  # little-endian, before each message; messages are JSON, which has integers of any size

_START_SECONDS = 60.0


class RendererConfig(msgspec.Struct, frozen=True):
    """The first message to a process, which answers with an empty RenderResult."""

    source: str
    special_tokens: dict[str, str]
    max_memory: int


class RenderRequest(msgspec.Struct, frozen=True):
    """The arguments of ChatTemplate.render."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    continue_final_message: bool


class RenderResult(msgspec.Struct, frozen=True):
    """A text, or an error with the request's parameter."""

    text: str = ""
    error: str = ""
    param: str | None = None


class TemplateRenderers:
    """Up to RENDERERS processes, started on demand. A killed process is replaced."""

    def __init__(self, template: ChatTemplate, seconds: float = RENDER_SECONDS, max_memory: int = MAX_MEMORY) -> None:
        self._config = msgspec.json.encode(RendererConfig(template.source, template.special_tokens, max_memory))
        self._seconds = seconds
        self._slots = asyncio.Semaphore(RENDERERS)
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def render(self, request: RenderRequest) -> str:
        """Raises RequestError where the template rejects the messages or exceeds its limits."""
        data = msgspec.json.encode(request)
        async with self._slots:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                rendered = await self._request_with_timeout(process, data)
            except BaseException:
                await self._kill(process)
                raise
            self._idle.append(process)
        if rendered.error:
            raise RequestError(rendered.error, rendered.param)
        return rendered.text

    async def _request_with_timeout(self, process: Process, data: bytes) -> RenderResult:
        try:
            async with asyncio.timeout(self._seconds):
                return await _exchange(process, data)
        except TimeoutError as exc:
            text = f"the chat template takes more than {self._seconds:g} s for these messages"
            raise RequestError(f"{text}; send fewer or shorter ones", "messages") from exc
        except (EOFError, OSError) as exc:
            raise RequestError(
                "the chat template crashed its process on these messages; change them", "messages"
            ) from exc

    async def close(self) -> None:
        for process in list(self._all):
            await self._kill(process)

    async def _start(self) -> Process:
        argv = [sys.executable, "-m", "router.text.chat.render_process"]
        process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, limit=1 << 20)
        self._all.add(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _exchange(process, self._config)
        except (TimeoutError, EOFError, OSError) as exc:
            await self._kill(process)
            raise NodeError("the router cannot start a process for chat templates; its log says why") from exc
        return process

    async def _kill(self, process: Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _exchange(process: Process, data: bytes) -> RenderResult:
    """Raises EOFError or OSError when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
    return msgspec.json.decode(await process.stdout.readexactly(length), type=RenderResult)
