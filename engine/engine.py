"""The step loop of a node."""

from __future__ import annotations

from engine.executor.rank import Ranks
from engine.executor.step_pipeline import StepPipeline
from engine.ipc.channel import Channel
from engine.ipc.messages import (
    Cancel,
    Configure,
    Connect,
    Disconnect,
    FreeLease,
    KVConfirmed,
    PrefillLocally,
    Shutdown,
    StartRead,
    Submit,
    ToEngine,
)
from engine.liveness.heartbeat_sender import LoopTimer
from engine.scheduler.scheduler import Scheduler


class Engine:
    """Carries out the frontend's commands between steps and sends the events of each step. Single-threaded."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks, channel: Channel) -> None:
        self.loop_timer = LoopTimer()
        self._scheduler = scheduler
        self._ranks = ranks
        self._pipeline = StepPipeline(ranks)
        self._channel = channel
        self._stopped = False

    def run(self) -> None:
        """Serve until a Shutdown. Raises ChannelClosed when the frontend has ended."""
        while not self._stopped:
            messages = self._channel.receive(wait=self.idle)
            self.loop_timer.begin()
            waited, in_runner = self._pipeline.waited, self._ranks.runner_seconds
            self.handle(messages)
            self.step()
            seconds = self.loop_timer.end(self._ranks.runner_seconds - in_runner)
            self._scheduler.totals.host_seconds += seconds - (self._pipeline.waited - waited)

    @property
    def idle(self) -> bool:
        """True if a step has nothing to do until a command, a grammar result or connector progress arrives."""
        return self._pipeline.empty and self._scheduler.idle

    def step(self) -> None:
        """One iteration: plan, load KV, execute, apply the step that is due, emit."""
        plan = self._scheduler.plan()
        self._emit()  # reservations and refusals do not wait for the device
        self._pipeline.launch(plan)
        self._scheduler.prepare()
        result = self._pipeline.take(plan)
        if result is not None:
            self._scheduler.apply(*result, self._pipeline.step_seconds)
            self._emit()

    def handle(self, messages: list[ToEngine]) -> None:
        """Carry out commands in order."""
        for message in messages:
            match message:
                case Submit():
                    self._scheduler.submit(message)
                case StartRead(rid, epoch, remote_blocks, num_tokens, digests):
                    self._scheduler.connector.start_read(rid, epoch, remote_blocks, num_tokens, digests)
                case KVConfirmed(rid, outputs):
                    self._scheduler.kv_confirmed(rid, outputs)
                case PrefillLocally(rid, outputs):
                    self._scheduler.prefill_locally(rid, outputs)
                case Cancel(rid):
                    self._scheduler.cancel(rid)
                case FreeLease(rid):
                    self._scheduler.free_lease(rid)
                case Connect(peer):
                    self._scheduler.connector.connect(peer)
                case Disconnect(epoch):
                    self._scheduler.connector.disconnect(epoch)
                case Shutdown():
                    self._stopped = True
                case Configure():
                    raise AssertionError("a running engine cannot be configured again")

    def _emit(self) -> None:
        batch = self._scheduler.take_events()
        if batch is not None:
            self._channel.send(batch)
