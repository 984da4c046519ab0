"""Chat template renderer: renders in separate processes, with limits on time and memory.

    router ── RendererConfig, then RenderRequest per chat ──► render_process.py
           ◄── RenderResult for each ───────────────────────

A template comes with the checkpoint and runs over client text: it may loop for ever or fill the memory, even while it
is compiled. In the router it would block every stream; here the process is killed and only its own request fails.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from subprocess import DEVNULL, PIPE

import msgspec

from pdserve.errors import CheckpointError, NodeError, RequestError
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.worker_process import WorkerPool, WorkerProcess, packed, unpacked

COMPILE_SECONDS = 5  # CPU time; real templates take less than 0.1 s, the process itself 0.2 s
RENDER_SECONDS = 5.0  # real templates take less than a millisecond for a message
MAX_MEMORY = 2 << 30  # bytes of address space
RENDERERS = 3  # processes; a client gets at most two

_PROCESS = "router.text.chat.render_process"


class RendererConfig(msgspec.Struct, frozen=True):
    """The first message to a process. It answers with a RenderResult, empty or with an error."""

    source: str
    special_tokens: dict[str, str]
    max_memory: int


class RenderResult(msgspec.Struct, frozen=True):
    """A text, or an error with the request's parameter."""

    text: str = ""
    error: str = ""
    param: str | None = None


def check_template(template: ChatTemplate, max_memory: int = MAX_MEMORY) -> None:
    """Compile a template in a process of its own. Raises CheckpointError."""
    setup = packed(_config(template, max_memory))
    argv = (sys.executable, "-P", "-m", _PROCESS)
    done = subprocess.run(argv, input=setup, stdout=PIPE, stderr=DEVNULL)
    if done.returncode == -signal.SIGXCPU:
        raise CheckpointError(f"the chat template takes more than {COMPILE_SECONDS} s to compile; shorten it")
    if done.returncode:
        raise CheckpointError(f"the chat template takes more than {max_memory >> 20} MiB to compile; shorten it")
    if error := msgspec.json.decode(unpacked(done.stdout), type=RenderResult).error:
        raise CheckpointError(error)


def _config(template: ChatTemplate, max_memory: int) -> bytes:
    return msgspec.json.encode(RendererConfig(template.source, template.special_tokens, max_memory))


class TemplateRenderers:
    """Up to RENDERERS processes, started on demand. A killed process is replaced."""

    def __init__(self, template: ChatTemplate, seconds: float = RENDER_SECONDS, max_memory: int = MAX_MEMORY) -> None:
        self._config = _config(template, max_memory)
        self._seconds = seconds
        self._workers = WorkerPool(self._start, RENDERERS)

    async def render(self, request: RenderRequest) -> str:
        """Raises RequestError where the template rejects the messages or exceeds its limits."""
        message = msgspec.json.encode(request)
        try:
            async with self._workers.worker() as worker:
                answer = await worker.exchange(message, self._seconds)
        except TimeoutError as exc:
            text = f"the chat template takes more than {self._seconds:g} s for these messages"
            raise RequestError(f"{text}; send fewer or shorter ones", "messages") from exc
        except (EOFError, OSError) as exc:
            text = "the chat template crashed its process on these messages; change them"
            raise RequestError(text, "messages") from exc
        rendered = msgspec.json.decode(answer, type=RenderResult)
        if rendered.error:
            raise RequestError(rendered.error, rendered.param)
        return rendered.text

    async def close(self) -> None:
        await self._workers.close()

    async def _start(self) -> WorkerProcess:
        try:
            worker, _ = await WorkerProcess.start(_PROCESS, self._config)
        except (TimeoutError, EOFError, OSError) as exc:
            raise NodeError("the router cannot start a process for chat templates; its log says why") from exc
        return worker
