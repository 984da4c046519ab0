"""The step loop of a node."""

from __future__ import annotations

from array import array

from engine.channel import Channel
from engine.messages import (
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
from engine.rank import Rank
from engine.scheduler import Scheduler


class Engine:
    """Takes the front's commands between steps and tells it what each step brought. Single-threaded."""

    def __init__(self, scheduler: Scheduler, rank: Rank, channel: Channel) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._channel = channel
        self._stopped = False

    def run(self) -> None:
        """Serve until told to stop. Raises ChannelClosed when the front has gone."""
        while not self._stopped:
            self.obey(self._channel.receive(wait=self._scheduler.idle))
            self.step()

    def step(self) -> None:
        """One turn: plan, load KV and execute, apply, emit."""
        plan = self._scheduler.plan()
        output = self._rank.execute(plan)
        self._scheduler.apply(plan, output)
        report = self._scheduler.take_report()
        if report is not None:
            self._channel.send(report)

    def obey(self, messages: list[ToEngine]) -> None:
        """Carry out commands, in their order."""
        for message in messages:
            match message:
                case Submit():
                    self._scheduler.submit(message, array("I", message.token_ids).tolist())
                case StartRead():
                    self._scheduler.start_read(message)
                case KVConfirmed(rid):
                    self._scheduler.kv_confirmed(rid)
                case PrefillLocally(rid, first):
                    self._scheduler.prefill_locally(rid, first)
                case Cancel(rid):
                    self._scheduler.cancel(rid)
                case FreeLease(rid):
                    self._scheduler.free_lease(rid)
                case Connect(peer):
                    self._scheduler.transfers.connect(peer)
                case Disconnect(epoch):
                    self._scheduler.transfers.disconnect(epoch)
                case Shutdown():
                    self._stopped = True
                case Configure():
                    raise AssertionError("a running engine cannot be configured again")
