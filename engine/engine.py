"""The step loop of a node."""

from __future__ import annotations

import time
from functools import partial

from engine.channel import Channel
from engine.executor.rank import Ranks
from engine.executor.step_pipeline import Result, StepPipeline
from engine.heartbeat_sender import LoopTimer
from engine.scheduler.scheduler import Scheduler
from pdserve.errors import PdserveError
from pdserve.ipc import messages
from pdserve.records import EMPTY_OUTPUT, NO_ORDERS

_SHORTEST_WAIT = 1e-3  # seconds: a selector's timeouts are milliseconds
_LOOKS = 25  # at a step while it executes: if it ends far too early, the device is idle for at most 1/25 of its time


class Engine:
    """Carries out the frontend's commands between steps and sends the events of each step. Single-threaded."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks, channel: Channel, stages: int = 1) -> None:
        self._scheduler = scheduler
        scheduler.room.emit = partial(self._emit, cache=False)
        self._ranks = ranks
        self._pipeline = StepPipeline(ranks, stages)
        self.loop_timer = LoopTimer(lambda: self._pipeline.expected)
        self._channel = channel
        self._stopped = False
        self._command: messages.ToEngine | None = None  # being carried out
        self._planning = False
        self._attended = 0.0  # seconds spent waiting for commands while steps execute

    def run(self) -> None:
        """Serve until a Shutdown. Raises ChannelClosed when the frontend has ended."""
        while not self._stopped:
            commands = self._channel.receive(self._patience)
            self.loop_timer.begin()
            waited = self._pipeline.waited
            in_runner = self._ranks.runner_seconds
            attended = self._attended
            self.handle(commands)
            self._attend(self._pipeline.plan_at)
            if not self._stopped:
                self.step()
            attended = self._attended - attended
            seconds = self.loop_timer.end(self._ranks.runner_seconds - in_runner + attended)
            self._scheduler.totals.host_seconds += seconds - (self._pipeline.waited - waited) - attended

    @property
    def idle(self) -> bool:
        """True if a step has nothing to do until a command, a grammar result or connector progress arrives."""
        return self._pipeline.empty and self._scheduler.idle

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for a command before the next step; None: without limit."""
        if not self.idle:
            return 0.0
        return _SHORTEST_WAIT if self._ranks.digesting else None

    def step(self) -> None:
        """One iteration: load KV, plan, execute, apply the step that is due, emit."""
        planned_at = time.perf_counter()
        self._serve_connector()
        self._planning = True
        plan = self._scheduler.plan(self._pipeline.busy)
        self._planning = False
        self._emit(cache=False)  # refusals do not wait for the device
        for result in self._pipeline.launch(plan, self._scheduler.expected, planned_at):
            self._apply(result)  # it would wait for the end of a long launch
        self._emit()
        self._scheduler.prepare()
        if self._scheduler.connector.peers.loads:
            self._attend(self._pipeline.ends_at)
        self._apply(self._pipeline.take(plan))

    def suspects(self) -> tuple[int, ...]:
        """Return the requests that an exception may come from, or the end of a rank. Any thread may call it then."""
        if self._command is not None:
            rid = getattr(self._command, "rid", None)
            return () if rid is None else (rid,)
        return tuple(self._scheduler.suspects(self._planning))

    def _apply(self, result: Result | None) -> None:
        if result is not None:
            self._scheduler.apply(*result, self._pipeline.step_seconds, self._emit)
            self._emit()

    def handle(self, commands: list[messages.ToEngine]) -> None:
        """Carry out commands in order."""
        scheduler = self._scheduler
        for command in commands:
            self._command = command
            match command:
                case messages.Submit():
                    scheduler.submit(command)
                case messages.LeaseCached():
                    scheduler.connector.lease_cached(command)
                case messages.StartRead():
                    scheduler.connector.peers.start_read(command)
                case messages.ComputeBeside(rid, num_tokens):
                    scheduler.loads.split(rid, num_tokens)
                case messages.HandoffEnds(rid, seconds):
                    scheduler.loads.ends_in(rid, seconds)
                case messages.KVConfirmed(rid, num_tokens, outputs, waited):
                    scheduler.loads.confirmed(rid, num_tokens, outputs, waited)
                case messages.PrefillLocally(rid, outputs):
                    scheduler.loads.given_up(rid, outputs)
                case messages.Cancel(rid):
                    scheduler.cancel(rid)
                case messages.Pause(rid):
                    scheduler.pause(rid)
                case messages.Resume(rid):
                    scheduler.resume(rid)
                case messages.FreeLease(rid):
                    scheduler.free_lease(rid)
                case messages.PutPixels() | messages.DropPixels():
                    scheduler.images.take(command)
                case messages.AddAdapter() | messages.RemoveAdapter():
                    scheduler.adapters.take(command)
                case messages.Connect(peer):
                    scheduler.connector.peers.connect(peer)
                case messages.Disconnect(epoch):
                    scheduler.connector.peers.disconnect(epoch)
                case messages.ChangeWeights():
                    self._change_weights(command)
                case messages.UseWeights(version):
                    scheduler.connector.tiers.use_weights(version)
                case messages.Shutdown():
                    self._stopped = True
                case messages.Configure() | messages.Ping():
                    raise AssertionError(f"a running engine cannot carry out {command}")
        self._command = None

    def _attend(self, until: float) -> None:
        """Carry out commands and pass on the connector's events while a step executes: no read waits for its end.

        Return at ``until``, of ``time.perf_counter``, or when the oldest step has ended before.
        """
        longest = (until - time.perf_counter()) / _LOOKS
        while not self._stopped and (left := until - time.perf_counter()) > _SHORTEST_WAIT:
            if self._ranks.oldest_is_done():
                return
            self._scheduler.room.admit_loads()
            self._serve_connector()
            self._emit()
            start = time.perf_counter()
            wait = _SHORTEST_WAIT if self._ranks.digesting else max(min(left / 4, longest), _SHORTEST_WAIT)
            commands = self._channel.receive(wait)
            self._attended += time.perf_counter() - start
            self.handle(commands)

    def _serve_connector(self) -> None:
        """Pass orders to the connector, and its events on to the scheduler and the frontend."""
        connector = self._scheduler.connector
        while True:
            orders = self._scheduler.adapters.add_orders(connector.take_orders())
            if orders is not NO_ORDERS:
                self._ranks.start_transfers(orders)
            output = self._ranks.poll()
            if output is EMPTY_OUTPUT:
                return
            connector.update(output)  # the end of a read orders its digests
            self._scheduler.adapters.update(output)

    def _change_weights(self, command: messages.ChangeWeights) -> None:
        while not self._pipeline.empty:
            self._apply(self._pipeline.take_oldest())
        kind = message = ""
        try:
            carry_out = self._ranks.check_weights if command.only_check else self._ranks.change_weights
            with self.loop_timer.other_work():
                carry_out(command.change)
            if not command.only_check:
                self._scheduler.forget_cached()
        except PdserveError as exc:
            kind = type(exc).__name__
            message = str(exc)
        self._emit()
        self._channel.send(messages.WeightsAnswer(kind, message, self._ranks.has_weights))

    def _emit(self, *, cache: bool = True) -> None:
        if (batch := self._scheduler.take_events(cache=cache)) is not None:
            self._channel.send(batch)
