"""A router on the event loop of a test, called through ASGI: its work can be counted (loop_work.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from machine import patience
from starlette.types import ASGIApp, Message

from router.http.app import create_app
from router.options import parse_options
from router.server import load_tokenizer
from router.service import Service

_PIECE = 64 * 1024


class InProcessRouter:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self.service = service

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        return await self._send("GET", path, b"")

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        return await self._send("POST", path, body)

    async def _send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        pieces = [body[at : at + _PIECE] for at in range(0, len(body), _PIECE)] or [b""]
        messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        messages[-1]["more_body"] = False
        sent: list[Any] = []

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-length", b"%d" % len(body))],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@asynccontextmanager
async def router_in_process(model_dir: Path, model: str, flags: Sequence[str]) -> AsyncIterator[InProcessRouter]:
    """Yield a router whose nodes are ready."""
    options = parse_options([str(model_dir), "--served-model-name", model, *flags])
    tokenizers = {name: (root, load_tokenizer(root, options.chat_template)) for name, root in options.models}
    service = Service(options, tokenizers)
    app = create_app(service)
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message] = asyncio.Queue()
    lifespan: asyncio.Task[None] = asyncio.create_task(
        app({"type": "lifespan", "state": {}}, inbox.get, outbox.put)  # type: ignore[arg-type]
    )
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        async with asyncio.timeout(patience(20)):
            await service.nodes.wait_until(lambda: service.nodes.ready)
        yield InProcessRouter(app, service)
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        await outbox.get()
        await lifespan
