"""The frontend's client of the engine: starts the process, sends commands, dispatches events to requests.

    frontend (asyncio, gRPC)                       engine process (step loop)
      EngineClient ──── Unix socket pair, messages of engine/ipc/messages.py ──── Channel
                 ◄─── stdout and stderr, passed through line by line ────

The client owns the process: ``shutdown`` ends it within a bound. When a frontend is killed, its socket closes, and that
ends the engine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Protocol

from engine.ipc.frames import Frames, framed
from engine.ipc.messages import (
    Batch,
    ChangeWeights,
    Configure,
    DecodeAheadEnded,
    Failed,
    FromEngine,
    Heartbeat,
    Leased,
    Pooled,
    Prefilled,
    Progress,
    RankPlacement,
    ReadChecked,
    ReadEnded,
    Ready,
    Refused,
    Reserved,
    Scored,
    Shutdown,
    Status,
    ToEngine,
    Totals,
    WeightsAnswer,
)
from engine.liveness.heartbeat_monitor import HeartbeatMonitor
from pdserve import errors
from pdserve.config.node_config import NodeConfig
from pdserve.errors import EngineDied, PdserveError
from pdserve.logs import chosen_format, message_of, relayed_line
from pdserve.process import describe_exit
from pdserve.records import FinishReason, RankKV, TokenLogprobs
from pdserve.transports import Connected
from pdserve.weight_change import WeightChange
from pdserve.weight_sharing import RankWeights, WeightPeer

Event = Prefilled | Scored | Pooled | Reserved | Refused | ReadEnded | ReadChecked | Leased | DecodeAheadEnded

_LAST_LINES = 20  # of the engine's stderr, kept for the error when it exits
_EXIT_GRACE = 2.0  # seconds between the end of the socket and SIGKILL
_SLEEP_SECONDS = 10.0  # for all ranks to free their devices
_STOPPED = Status(0, 0, 0, 0, 0, 0, 0, 0, Totals())


class RequestHandler(Protocol):
    """Receives the output tokens and other events of one request."""

    def on_token(
        self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None
    ) -> None: ...

    def on_event(self, event: Event) -> None: ...


class EngineClient:
    """One engine process at a time. No method but ``start``, ``shutdown`` and those of weights waits."""

    def __init__(self, config: NodeConfig, agent: str, placement: RankPlacement) -> None:
        self._agent = agent
        self._placement = placement
        self._handlers: dict[int, RequestHandler] = {}
        self._rids = itertools.count(1)
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._starts = itertools.count()
        self._started: asyncio.Future[Ready]
        self._must_run = False
        self.closed: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self.status = _STOPPED
        self._full_step = config.max_batch_tokens, config.max_num_seqs
        self.monitor = HeartbeatMonitor(config.peer_timing.answer_timeout)
        self.kv_layout = config.kv_layout  # an estimate until the engine is ready, where memory is measured
        self.decision = config.decision  # likewise until ranks on other hosts have joined
        self.ranks: tuple[RankKV, ...] = ()
        self.weights: tuple[RankWeights, ...] = ()  # offered to nodes that start
        self.has_weights = True
        self._weights_answer: asyncio.Future[WeightsAnswer] | None = None
        self._on_weights_order_done: Callable[[], None] = lambda: None
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.on_read: Callable[[ReadEnded], None] = lambda ended: None  # called for every read
        self.on_read_checked: Callable[[ReadChecked], None] = lambda checked: None  # likewise
        self.on_connected: Callable[[Connected], None] = lambda connection: None
        self.on_failed_peer: Callable[[str, str], None] = lambda epoch, reason: None

    # ------------------------------------------------------------ process

    async def start(self, config: NodeConfig, peer: WeightPeer | None = None) -> None:
        """Start the engine, which loads weights from ``peer`` if there is one, and wait until it is ready.

        Raises the error that it reports, or EngineDied.
        """
        self._started = asyncio.get_running_loop().create_future()
        # Stale references to an earlier start cannot match.
        agent = self._agent and f"{self._agent}-{next(self._starts)}"
        ours, theirs = socket.socketpair()
        heartbeats, their_heartbeats = socket.socketpair()
        with theirs, their_heartbeats:
            fds = theirs.fileno(), their_heartbeats.fileno()
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "engine.process", *map(str, fds)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # the frontend handles Ctrl-C
            )
        self._watch = asyncio.create_task(self._watch_process(process), name="engine watch")
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: _EngineProtocol(self._receive, partial(_end_soon, process)), sock=ours
        )
        await loop.create_connection(lambda: _EngineProtocol(self._receive, lambda: None), sock=heartbeats)
        self.send(Configure(config, agent, self._placement, peer))
        ready = await self._started
        self.ranks, self.kv_layout, self.decision = ready.ranks, ready.kv_layout, ready.decision
        self.weights = ready.weights
        total = ready.kv_layout.num_blocks
        self.status = Status(total, 0, 0, 0, total, 0, 0, 0, Totals())
        self.has_weights = True

    async def sleep(self) -> None:
        """End the engine, or what has failed to start, until the next ``start``. No request may be open."""
        self._must_run = False
        await self.shutdown(_SLEEP_SECONDS)
        self.status, self.weights = _STOPPED, ()

    async def shutdown(self, seconds: float = 1.0) -> None:
        """End the engine: request, terminate, kill. Takes little more than twice ``seconds``. Idempotent."""
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

    # ------------------------------------------------------------ weights

    async def check_weights(self, change: WeightChange) -> None:
        """Compare a change with the weights. Raises what ``change_weights`` would; nothing changes."""
        await self._order_weights(ChangeWeights(change, only_check=True))

    async def change_weights(self, change: WeightChange, on_changed: Callable[[], None]) -> None:
        """Change the weights and empty the prefix cache. No other change runs; no KV of open requests is leased.

        ``on_changed`` is called before any event that follows the change. Raises the ranks' error; then the old
        weights are in use, unless ``has_weights`` is False.
        """
        await self._order_weights(ChangeWeights(change), on_changed)

    async def _order_weights(self, order: ChangeWeights, on_done: Callable[[], None] = lambda: None) -> None:
        answered = self._weights_answer = asyncio.get_running_loop().create_future()
        self._on_weights_order_done = on_done
        self.send(order)
        await asyncio.wait([answered, self.closed], return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise self.closed.result()
        answer = answered.result()
        self.has_weights = answer.has_weights
        if answer.kind:
            raise getattr(errors, answer.kind)(answer.message)

    # ------------------------------------------------------------ requests

    def open(self, handler: RequestHandler) -> int:
        """Return a new request id, whose events go to ``handler``."""
        rid = next(self._rids)
        self._handlers[rid] = handler
        return rid

    def close(self, rid: int) -> None:
        """Drop further events of this request. Idempotent."""
        self._handlers.pop(rid, None)

    @property
    def has_remote_ranks(self) -> bool:
        """Whether ranks on other hosts join; they must have the configuration that ``start`` is given."""
        return bool(self._placement.listen)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def stalled(self) -> bool:
        """Whether the engine's step takes so long that requests had better run elsewhere."""
        throughput, (num_tokens, num_seqs) = self.status.throughput, self._full_step
        return self.monitor.stalled(max(throughput.prompt.at(num_tokens), throughput.decode.at(num_seqs)))

    def send(self, message: ToEngine) -> None:
        """Queue a command. It is dropped when the engine has died, which ends the node anyway."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(framed(message))

    def refuse_all(self, error: PdserveError) -> None:
        """Fail all open requests: the engine does not answer."""
        for rid, handler in list(self._handlers.items()):
            handler.on_event(Refused(rid, type(error).__name__, str(error)))

    # ------------------------------------------------------------ events

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Batch():
                self._dispatch(message)
            case Progress():
                self.on_progress(message)
            case Ready() if not self._started.done():  # else a signal came while loading
                self._must_run = True
                self._started.set_result(message)
            case WeightsAnswer() if self._weights_answer is not None:
                self._weights_answer.set_result(message)
                if not message.kind:
                    self._on_weights_order_done()
            case Heartbeat():
                self.monitor.receive(message)
            case Failed(kind, text) if not self._started.done():
                self._started.set_exception(_error(kind, text))

    def _dispatch(self, batch: Batch) -> None:
        self.status = batch.status
        self.on_batch(batch)
        for read in batch.reads:
            self.on_read(read)
        for checked in batch.checked:
            self.on_read_checked(checked)
        early = batch.reserved, batch.refused, batch.reads, batch.checked, batch.scored, batch.prefilled, batch.pooled
        self._dispatch_events(*early)
        for rid, choice, token_id, finish, logprobs in batch.outputs.rows():
            if (handler := self._handlers.get(rid)) is not None:  # else it was closed meanwhile
                handler.on_token(choice, token_id, finish, logprobs)
        self._dispatch_events(batch.decode_ahead_ended, batch.leased)
        for connection in batch.connected:
            self.on_connected(connection)
        for epoch, reason in batch.failed_peers:
            self.on_failed_peer(epoch, reason)

    def _dispatch_events(self, *columns: Iterable[Event]) -> None:
        for event in itertools.chain.from_iterable(columns):
            if (handler := self._handlers.get(event.rid)) is not None:  # else it was closed meanwhile
                handler.on_event(event)

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        """Relay the engine's output until it exits, then complete ``closed`` unless that was meant."""
        assert process.stdout is not None
        in_json = chosen_format() == "json"
        async for line in _lines(process.stdout):
            print(relayed_line(line, {"process": "engine"}) if in_json else line, file=sys.stderr, flush=True)
            if line.strip():
                self._last_lines.append(message_of(line))
        error = EngineDied(_exit_reason(await process.wait(), self._last_lines))
        if not self._started.done():
            self._started.set_exception(error)
        if self._must_run:
            self.closed.set_result(error)


def _end_soon(process: asyncio.subprocess.Process) -> None:
    """Kill an engine that has closed its socket, unless it exits."""

    def kill() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                process.kill()

    if process.returncode is None:
        asyncio.get_running_loop().call_later(_EXIT_GRACE, kill)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines of any length, without line ends."""
    rest = b""
    while chunk := await stream.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class _EngineProtocol(asyncio.Protocol):
    def __init__(self, on_message: Callable[[FromEngine], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._frames: Frames[FromEngine] = Frames(FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.cut(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


def _error(kind: str, text: str) -> PdserveError:
    """Return the error that the engine named; an unknown kind is EngineDied."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, PdserveError):
        return known(text)
    return EngineDied(f"{kind}: {text}")


def error_of(refused: Refused) -> PdserveError:
    return _error(refused.kind, refused.message)


def _exit_reason(returncode: int, last_lines: deque[str]) -> str:
    last = f"; its last output: {last_lines[-1]}" if last_lines else ""
    return f"the engine process {describe_exit(returncode)}{last}"
