"""A decode node whose outputs a test scripts, for edge cases that real nodes cannot be made to show.

Real gRPC on a real port, in a thread of the test. A request finds its script by its ``cache_salt``.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
from machine import patience

from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel as rpc
from pdserve.rpc.protobuf import unpack_tokens

Result = TypeVar("Result")


class Conversation:
    """One request, as a script sees it."""

    def __init__(self, message: pb.Generate, outbox: asyncio.Queue[pb.OutputBatch]) -> None:
        self.message = message
        self.prompt = list(unpack_tokens(message.token_ids))
        self.cancelled = asyncio.Event()
        self.paused = False
        self._outbox = outbox

    def token(self, token_id: int, choice: int = 0, finish: str = "", **fields: Any) -> None:
        """Send one token."""
        self.put(pb.Output(choice=choice, token_id=token_id, has_token=True, finish_reason=finish, **fields))

    def score(self, logprobs: Sequence[float], first: int = 1) -> None:
        """Send log-probabilities of prompt tokens, from the second one on."""
        table = b"".join(struct.pack("<fI", logprob, 1) for logprob in logprobs)
        self.put(pb.Output(prompt_logprobs=pb.PromptLogprobs(first=first, table=table)))

    def fail(self, code: pb.Failure.Code.ValueType, message: str = "scripted", retry_after_ms: int = 0) -> None:
        self.put(pb.Output(failure=pb.Failure(code=code, message=message, retry_after_ms=retry_after_ms)))

    def send(self, batch: pb.OutputBatch) -> None:
        self._outbox.put_nowait(batch)

    def put(self, output: pb.Output) -> None:
        """Send an output of this request."""
        output.request = self.message.request
        self.send(pb.OutputBatch(outputs=[output]))


Script = Callable[[Conversation], Coroutine[Any, Any, None]]


class ScriptedNode(pb_grpc.DecodeNodeServicer, pb_grpc.NodeServicer):
    """``scripts`` by cache salt; ``seen`` holds every conversation by cache salt, the latest one."""

    def __init__(self, model: str, max_model_len: int = 1000, vocab_size: int = 506, node_id: str = "d0") -> None:
        self.scripts: dict[str, Script] = {}
        self.seen: dict[str, Conversation] = {}
        self.pauses: list[int] = []  # ms between reports that routers have asked for
        self.description = pb.NodeDescription(
            node_id=node_id,
            epoch="1",
            role="decode",
            state="ready",
            protocol=PROTOCOL_VERSION,
            model=model,
            compat_hash="h",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self.load = pb.NodeLoad()
        self.reports = 0
        self.cached = pb.CacheChange()  # sent in each report
        self.reading = asyncio.Event()  # cleared: new streams are not read
        self.reading.set()
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted node", daemon=True)
        self._thread.start()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the previous port if there was one."""
        self.call(self._start())

    def stop(self) -> None:
        """End at once, like a process that was killed."""
        if self._server is not None:
            self.call(self._server.stop(None))
            self._server = None

    def close(self) -> None:
        self.stop()
        self.call(self._cancel_scripts())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something on the node's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=patience(30))

    def do(self, work: Callable[[], None]) -> None:
        """Have something done on the node's event loop soon."""
        self._loop.call_soon_threadsafe(work)

    def wait_cancelled(self, salt: str, seconds: float = 20.0) -> None:
        """Returns once the router has cancelled the request of a script."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while salt not in self.seen:  # noqa: ASYNC110 - it may not have arrived yet
                    await asyncio.sleep(0.01)
                await self.seen[salt].cancelled.wait()

        self.call(wait())

    async def _cancel_scripts(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=rpc.server_options())
        self.add_services(self._server)
        self.port = rpc.bind(self._server, "127.0.0.1", self.port)
        await self._server.start()

    def add_services(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeNodeServicer_to_server(self, server)
        pb_grpc.add_NodeServicer_to_server(self, server)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        return self.description

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeReport]:
        sequence = 0
        self.pauses.append(request.pause_ms)
        while True:
            sequence += 1
            self.reports += 1
            yield pb.NodeReport(sequence=sequence, description=self.description, load=self.load, cache=self.cached)
            await asyncio.sleep(0.5)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus()

    async def Serve(self, requests: AsyncIterator[pb.ServeRequest], context: Any) -> AsyncIterator[pb.OutputBatch]:
        outbox: asyncio.Queue[pb.OutputBatch] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.ServeRequest], outbox: asyncio.Queue[pb.OutputBatch]) -> None:
        by_number: dict[int, Conversation] = {}
        tasks: list[asyncio.Task[None]] = []
        await self.reading.wait()
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "cancel":
                by_number[request.cancel.request].cancelled.set()
                continue
            if kind in ("pause", "resume"):
                by_number[getattr(request, kind).request].paused = kind == "pause"
                continue
            conversation = Conversation(request.generate, outbox)
            by_number[request.generate.request] = conversation
            salt = request.generate.cache_salt
            self.seen[salt] = conversation
            tasks.append(asyncio.create_task(self.scripts[salt](conversation)))
