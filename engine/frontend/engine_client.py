"""The front's end of the engine: it starts the process, passes commands on and hands events to whom they concern.

    front (asyncio, gRPC)                          engine process (step loop)
      EngineClient ──── Unix socket pair, messages of engine/ipc/messages.py ──── Channel
                 ◄─── stdout and stderr, passed through line by line ────

The link owns the process: ``shutdown`` ends it within a bound, and a front that is killed closes the socket, which ends
the engine, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from engine.ipc.frames import Frames, framed
from engine.ipc.messages import (
    Batch,
    Beat,
    Configure,
    FromEngine,
    Leased,
    Output,
    Posts,
    Progress,
    ReadEnded,
    Ready,
    Refused,
    Reserved,
    Scored,
    Shutdown,
    StartFailed,
    Status,
    ToEngine,
    Totals,
)
from engine.liveness.heartbeat_monitor import HeartbeatMonitor
from pdserve import errors
from pdserve.config.node_config import NodeConfig
from pdserve.errors import EngineDied, PdserveError
from pdserve.logs import chosen_format, message_of, relayed_line
from pdserve.records import RankKV
from pdserve.transports import Connected

Event = Output | Scored | Reserved | Refused | ReadEnded | Leased
Handler = Callable[[Event], None]

_LAST_LINES = 20  # of the engine's stderr, kept for its obituary
_EXIT_GRACE = 2.0  # seconds between the end of the socket and SIGKILL


class EngineClient:
    """One engine process. Everything but ``start`` and ``shutdown`` returns at once."""

    def __init__(self, config: NodeConfig, agent: str, posts: Posts) -> None:
        self._configure = Configure(config, agent, posts)
        self._handlers: dict[int, Handler] = {}
        self._rids = itertools.count(1)
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self.status = Status(0, 0, 0, 0, 0, 0, 0, 0, Totals())
        self.pulse = HeartbeatMonitor(config.peer_timing.answer_timeout)
        self.kv_layout = config.kv_layout  # an estimate where memory is measured, until the engine is ready
        self.ranks: tuple[RankKV, ...] = ()
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.on_read: Callable[[ReadEnded], None] = lambda ended: None  # of every read, whoever waits for it
        self.on_connected: Callable[[Connected], None] = lambda connection: None
        self.on_failed_peer: Callable[[str, str], None] = lambda epoch, reason: None

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises what it failed with, or EngineDied."""
        ours, theirs = socket.socketpair()
        ear, heart = socket.socketpair()
        with theirs, heart:
            fds = theirs.fileno(), heart.fileno()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "engine.process", *map(str, fds)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is the front's to handle
            )
        self._watch = asyncio.create_task(self._watch_process(self._process), name="engine watch")
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: _FromEngine(self._receive, self._socket_ended), sock=ours
        )
        await loop.create_connection(lambda: _FromEngine(self._receive, lambda: None), sock=ear)
        self.send(self._configure)
        ready = await self._started
        self.ranks, self.kv_layout = ready.ranks, ready.kv_layout
        total = ready.kv_layout.num_blocks
        self.status = Status(total, 0, 0, 0, total, 0, 0, 0, Totals())

    async def shutdown(self, seconds: float = 1.0) -> None:
        """End the engine: ask, then terminate, then kill. Takes little more than twice ``seconds``. Idempotent."""
        if self._process is None or self._watch is None:
            return
        self.send(Shutdown())
        for force in (self._process.terminate, self._process.kill):
            done, _ = await asyncio.wait([self._watch], timeout=seconds)
            if done:
                break
            force()
        await self._watch
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ requests

    def open(self, handler: Handler) -> int:
        """A new request id, whose events go to ``handler``."""
        rid = next(self._rids)
        self._handlers[rid] = handler
        return rid

    def close(self, rid: int) -> None:
        """No more events of this request. Idempotent."""
        self._handlers.pop(rid, None)

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None before it was started."""
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a command; it is lost when the engine has died, which ends the node anyway."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(framed(message))

    def refuse_all(self, error: PdserveError) -> None:
        """Tell whoever waits for the engine that it will not answer."""
        for rid, handler in list(self._handlers.items()):
            handler(Refused(rid, type(error).__name__, str(error)))

    # ------------------------------------------------------------ what comes back

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Batch():
                self._dispatch(message)
            case Progress():
                self.on_progress(message)
            case Ready() if not self._started.done():  # else nobody waits any more: told to stop while loading
                self._started.set_result(message)
            case Beat():
                self.pulse.beat(message)
            case StartFailed(kind, text) if not self._started.done():
                self._started.set_exception(_error(kind, text))

    def _dispatch(self, batch: Batch) -> None:
        self.status = batch.status
        self.on_batch(batch)
        for read in batch.reads:
            self.on_read(read)
        events: Iterable[Event] = itertools.chain(
            batch.reserved, batch.refused, batch.reads, batch.scored, batch.outputs, batch.leased
        )
        for event in events:
            if (handler := self._handlers.get(event.rid)) is not None:  # else it was closed meanwhile
                handler(event)
        for connection in batch.connected:
            self.on_connected(connection)
        for epoch, reason in batch.failed_peers:
            self.on_failed_peer(epoch, reason)

    def _socket_ended(self) -> None:
        if self._process is not None and self._process.returncode is None:
            asyncio.get_running_loop().call_later(_EXIT_GRACE, self._kill)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                self._process.kill()

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        """Pass the engine's words on until it ends, then tell whoever waits for it."""
        assert process.stdout is not None
        in_json = chosen_format() == "json"
        async for line in _lines(process.stdout):
            print(relayed_line(line, {"process": "engine"}) if in_json else line, file=sys.stderr, flush=True)
            if line.strip():
                self._last_lines.append(message_of(line))
        error = EngineDied(_obituary(await process.wait(), self._last_lines))
        if not self._started.done():
            self._started.set_exception(error)
        self.closed.set_result(error)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """What comes, by lines however long, without their ends."""
    rest = b""
    while chunk := await stream.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class _FromEngine(asyncio.Protocol):
    """Receives messages of the engine."""

    def __init__(self, on_message: Callable[[FromEngine], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._frames: Frames[FromEngine] = Frames(msgspec.msgpack.Decoder(FromEngine))

    def data_received(self, data: bytes) -> None:
        for message in self._frames.cut(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


def _error(kind: str, text: str) -> PdserveError:
    """The error that the engine named; one that is not ours is the engine's death."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, PdserveError):
        return known(text)
    return EngineDied(f"{kind}: {text}")


def error_of(refused: Refused) -> PdserveError:
    """What the engine refused a request with."""
    return _error(refused.kind, refused.message)


def _obituary(returncode: int, last_lines: deque[str]) -> str:
    if returncode < 0:
        how = f"was killed by {signal.Signals(-returncode).name}"
    else:
        how = f"ended with status {returncode}"
    words = f"; its last words: {last_lines[-1]}" if last_lines else ""
    return f"the engine process {how}{words}"
