"""The frontend's client of the engine: its start and end, its state, its weights, and commands to it.

``engine_process.py`` has the process and its sockets, ``request_events.py`` the events of requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from node.engine_client.engine_process import EngineProcess
from node.engine_client.launched_engine import LaunchedEngine, launch_engine
from node.engine_client.request_events import RequestEvents, RequestHandler, named_error
from pdserve.adapters.adapter import Adapter
from pdserve.config.node_config import NodeConfig
from pdserve.errors import EngineCrashed, EngineDied, PdserveError
from pdserve.ipc.heartbeat_monitor import HeartbeatMonitor
from pdserve.ipc.messages import (
    AdapterAdded,
    AddAdapter,
    ChangeWeights,
    Configure,
    Crashed,
    EventBatch,
    Failed,
    FromEngine,
    Heartbeat,
    Progress,
    RankPlacement,
    ReadChecked,
    ReadEnded,
    Ready,
    RemoveAdapter,
    Status,
    ToEngine,
    WeightsAnswer,
)
from pdserve.kv.transports import Connected
from pdserve.records import RankKV
from pdserve.weights.change import WeightChange
from pdserve.weights.sharing import RankWeights, WeightPeer

_SLEEP_SECONDS = 10.0  # time for all ranks to free their devices


class EngineClient:
    """One engine process at a time. Only ``start``, ``sleep``, ``shutdown`` and the methods for weights wait."""

    def __init__(
        self,
        config: NodeConfig,
        agent: str,
        placement: RankPlacement,
        launched: LaunchedEngine,
        *,
        cache_changes: bool = False,
    ) -> None:
        """``launched`` is the process of the first start.

        With ``cache_changes``, batches have the prefix cache's changes with tokens.
        """
        self._cache_changes = cache_changes
        self._launched: LaunchedEngine | None = launched
        self._agent = agent
        self._placement = placement
        self._events = RequestEvents()
        self._process = EngineProcess(self._receive, self._on_exit)
        self._starts = itertools.count()
        self._started: asyncio.Future[Ready]
        self._must_run = False
        self.closed: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self.status = Status()
        self.monitor = HeartbeatMonitor(config.options.peer_timing.answer_timeout)
        self.kv_layout = config.kv_layout  # an estimate until the engine is ready, if it measures memory
        self.decision = config.decision  # provisional until ranks on other hosts have joined
        self.ranks: tuple[RankKV, ...] = ()
        self.weights: tuple[RankWeights, ...] = ()  # offered to nodes that start
        self.has_weights = True
        self._suspects: frozenset[int] | None = None  # rids that may have caused the engine's end; None: unknown
        self._unreported: list[EventBatch] = []
        self._weights_answer: asyncio.Future[WeightsAnswer] | None = None
        self._adapters: dict[str, asyncio.Future[AdapterAdded]] = {}  # loads by digest
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_batch: Callable[[EventBatch], None] = lambda batch: None  # called after the other callbacks
        self.on_read: Callable[[ReadEnded], None] = lambda ended: None  # called for every read
        self.on_read_checked: Callable[[ReadChecked], None] = lambda checked: None  # called for every checked read
        self.on_connected: Callable[[Connected], None] = lambda connection: None
        self.on_failed_peer: Callable[[str, str], None] = lambda epoch, reason: None
        self.on_revoke: Callable[[int], None] = lambda rid: None

    # ------------------------------------------------------------ start and end

    async def start(self, config: NodeConfig, peer: WeightPeer | None = None) -> Ready:
        """Start the engine, which loads weights from ``peer`` if there is one, and wait until it is ready.

        Raises the error that the engine reports, or EngineDied.
        """
        self._started = asyncio.get_running_loop().create_future()
        # Stale references to an earlier start cannot match.
        agent = self._agent and f"{self._agent}-{next(self._starts)}"
        self._process = EngineProcess(self._receive, self._on_exit)
        self._suspects = None
        launched = self._launched
        self._launched = None
        num_ranks = 0 if config.device.kind == "simulated" else len(self._placement.devices)
        await self._process.take_over(launched or launch_engine(num_ranks))
        self.monitor.restart()
        self.send(Configure(config, agent, self._placement, peer, self._cache_changes))
        ready = await self._started
        self.ranks = ready.ranks
        self.kv_layout = ready.kv_layout
        self.decision = ready.decision
        self.weights = ready.weights
        total = ready.kv_layout.num_blocks
        self.status = Status(free=total, total=total)
        self.has_weights = True
        return ready

    async def sleep(self) -> None:
        """End the engine, or what has failed to start, until the next ``start``. No request may be open."""
        self._must_run = False
        await self.shutdown(_SLEEP_SECONDS)
        self.status = Status()
        self.weights = ()

    async def shutdown(self, seconds: float = 1.0) -> None:
        """End the engine: request, terminate, kill. Takes little more than twice ``seconds``. Idempotent."""
        await self._process.end(seconds)

    # ------------------------------------------------------------ weights

    async def check_weights(self, change: WeightChange) -> None:
        """Compare a change with the weights. Raises what ``change_weights`` would; nothing changes."""
        await self._order_weights(ChangeWeights(change, only_check=True))

    async def change_weights(self, change: WeightChange) -> None:
        """Change the weights and empty the prefix cache. No request may be open, and no other change runs.

        Raises the ranks' error; then the old weights are in use, unless ``has_weights`` is False.
        """
        await self._order_weights(ChangeWeights(change))

    async def _order_weights(self, order: ChangeWeights) -> None:
        answered = self._weights_answer = asyncio.get_running_loop().create_future()
        self.send(order)
        await asyncio.wait([answered, self.closed], return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise self.closed.result()
        answer = answered.result()
        self.has_weights = answer.has_weights
        if answer.kind:
            raise named_error(answer.kind, answer.message)

    # ------------------------------------------------------------ adapters

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter on all ranks; then requests may use it. One load of a digest at a time.

        Raises the error of the engine or of a rank.
        """
        added = self._adapters[adapter.digest] = asyncio.get_running_loop().create_future()
        self.send(AddAdapter(adapter))
        try:
            await asyncio.wait([added, self.closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._adapters[adapter.digest]
        if not added.done():
            raise self.closed.result()
        if (answer := added.result()).kind:
            raise named_error(answer.kind, answer.message)

    def remove_adapter(self, digest: str) -> None:
        """Refuse new requests of an adapter."""
        self.send(RemoveAdapter(digest))

    # ------------------------------------------------------------ state and requests

    @property
    def has_remote_ranks(self) -> bool:
        """Whether ranks on other hosts join."""
        return bool(self._placement.listen)

    @property
    def local_ranks(self) -> range:
        return range(len(self._placement.devices))

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before it is started."""
        return self._process.pid

    @property
    def stalled(self) -> bool:
        """Whether the engine's step takes so long that routers should send requests elsewhere."""
        return self.monitor.stalled

    def send(self, message: ToEngine) -> None:
        """Queue a command. It is dropped when the engine has died, which ends the node anyway."""
        if self._process.send(message):
            self.monitor.sent()

    async def room(self) -> None:
        """Wait until the engine has taken most of the commands: a large one delays those that follow it."""
        await self._process.room()

    def open(self, handler: RequestHandler) -> int:
        """Return a new request id, whose events go to ``handler``."""
        return self._events.open(handler)

    def close(self, rid: int) -> None:
        """Drop further events of this request. Idempotent."""
        self._events.close(rid)

    def refuse_all(self, error: PdserveError) -> None:
        """Fail all open requests: the engine does not answer."""
        self._events.refuse_all(lambda rid: error)

    def fail_all(self, died: EngineDied, name: str) -> None:
        """Fail all open requests, as the engine of node ``name`` has died: EngineCrashed for suspects."""
        suspects = self._suspects
        killed = self._process.killed_from_outside
        lost = EngineDied(f"{name}: {died}")
        crashed = EngineCrashed(f"{name}: {died}")

        def error_of(rid: int) -> PdserveError:
            is_suspect = not killed if suspects is None else rid in suspects
            return crashed if is_suspect else lost

        self._events.refuse_all(error_of)

    # ------------------------------------------------------------ messages

    def _receive(self, message: FromEngine) -> None:
        match message:
            case EventBatch():
                self._on_batch(message)
            case Progress():
                self.on_progress(message)
            case Ready() if not self._started.done():  # else a signal came while loading
                self._must_run = True
                self._started.set_result(message)
            case WeightsAnswer() if self._weights_answer is not None:
                self._weights_answer.set_result(message)
            case Heartbeat():
                self.monitor.receive(message)
            case Crashed(rids):
                self._suspects = frozenset(rids)
            case Failed(kind, text) if not self._started.done():
                self._started.set_exception(named_error(kind, text))

    def _on_batch(self, batch: EventBatch) -> None:
        self.status = batch.status
        for read in batch.reads:
            self.on_read(read)
        for checked in batch.checked:
            self.on_read_checked(checked)
        self._events.dispatch(batch)
        for connection in batch.connected:
            self.on_connected(connection)
        for answer in batch.adapters:
            if (added := self._adapters.get(answer.digest)) is not None and not added.done():
                added.set_result(answer)
        for epoch, reason in batch.failed_peers:
            self.on_failed_peer(epoch, reason)
        for rid in batch.revoke:
            self.on_revoke(rid)
        if not self._unreported:
            asyncio.get_running_loop().call_soon(self._report)  # after the tasks that these events have woken
        self._unreported.append(batch)

    def _report(self) -> None:
        for batch in self._unreported:
            self.on_batch(batch)
        self._unreported.clear()

    def _on_exit(self, error: EngineDied) -> None:
        """Complete ``closed`` unless the exit was meant."""
        self._report()
        if not self._started.done():
            self._started.set_exception(error)
        if self._must_run:
            self.closed.set_result(error)
