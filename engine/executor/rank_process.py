"""A rank other than the leader: ``python -m engine.executor.rank_process FD``, its end of a socket to the leader.

    leader ──► reader thread ──plans──► main thread: launch ──steps in flight──► reporter thread ──► leader
               its end ends us                                  connector news ──►

Three threads, so that a step is launched while the one before it is still computed, and so that the leader's end is
noticed also while the others are stuck in a collective.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import NoReturn

import msgspec

from engine.executor.build import build_rank
from engine.executor.rank import PendingOutput, Rank
from engine.executor.rank_messages import Assign, Failed, FromRank, RankOutput, RankReady, Step, ToRank
from engine.ipc.frames import Frames, framed
from engine.ipc.messages import Shutdown
from engine.liveness.heartbeat_sender import HeartbeatSender, LoopTimer
from pdserve.errors import PdserveError
from pdserve.logs import chosen_format, set_process_fields, setup_logging
from pdserve.process import EXIT_FAILED, EXIT_ORPHANED, end_with_parent, exit_status, one_line
from pdserve.records import EMPTY_OUTPUT, StepPlan

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 18


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    leader = Leader(socket.socket(fileno=int(argv[0])))
    assign = leader.wait_assign()
    name = str(assign.config.place)
    set_process_fields(process=name)
    setup_logging("", chosen_format(), f"{name}: %(levelname)s %(name)s: %(message)s")
    in_flight: queue.SimpleQueue[PendingOutput | None] = queue.SimpleQueue()
    try:
        rank, kv = build_rank(
            assign.config, assign.agent, assign.meeting, lambda stage, fraction: None, lambda: in_flight.put(None)
        )
    except Exception as exc:
        leader.give_up(exc)
    gc.collect()
    gc.freeze()
    leader.send(RankReady(kv, rank.kv_layout))
    HeartbeatSender(LoopTimer(), leader.send, assign.config.peer_timing.answer_timeout).start()
    threading.Thread(target=_report, args=(rank, in_flight, leader), name="reporter", daemon=True).start()
    try:
        while (plan := leader.plans.get()) is not None:
            in_flight.put(rank.launch(plan))
        rank.close()
    except Exception as exc:
        leader.give_up(exc)
    return 0


def _report(rank: Rank, in_flight: queue.SimpleQueue[PendingOutput | None], leader: Leader) -> None:
    """Tell the leader of each step, in their order; None stands for news of the connector, told at once or with one."""
    try:
        while True:
            pending = in_flight.get()
            if pending is not None:
                leader.send(RankOutput(pending.result()))
            elif (news := rank.news()) is not EMPTY_OUTPUT:
                leader.send(RankOutput(news))
    except Exception as exc:
        leader.give_up(exc)


class Leader:
    """The leader as a rank knows it. Its end is the rank's, at once."""

    def __init__(self, sock: socket.socket) -> None:
        self.plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()  # None: end
        self._socket = sock
        self._sending = threading.Lock()
        self._assigned: queue.SimpleQueue[Assign] = queue.SimpleQueue()
        self._ending = False
        threading.Thread(target=self._read, name="leader", daemon=True).start()

    def wait_assign(self) -> Assign:
        return self._assigned.get()

    def send(self, message: FromRank) -> None:
        """From any thread; waits until it is sent, where the leader stands still."""
        frame = framed(message)
        with self._sending:
            self._socket.sendall(frame)

    def give_up(self, error: Exception) -> NoReturn:
        """Say why this rank cannot go on, here and to the leader, and end."""
        expected = isinstance(error, PdserveError)
        if expected:
            _log.error("%s", one_line(error))
        else:
            _log.error("an error that nobody foresaw", exc_info=error)
        frame = framed(Failed(type(error).__name__ if expected else "EngineDied", one_line(error)))
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:  # it has gone, and wants to know nothing
                os._exit(EXIT_ORPHANED)
            os._exit(exit_status(error) if expected else EXIT_FAILED)

    def _read(self) -> None:
        frames: Frames[ToRank] = Frames(msgspec.msgpack.Decoder(ToRank))
        try:
            while data := self._socket.recv(_READ_BYTES):
                for message in frames.cut(data):
                    self._take(message)
        except OSError:
            pass  # as good as its end
        except Exception:
            _log.exception("what the leader said cannot be understood")
        with self._sending:  # who gives up has its own status, and the leader ends when it hears of that
            os._exit(0 if self._ending else EXIT_ORPHANED)

    def _take(self, message: ToRank) -> None:
        match message:
            case Step(plan):
                self.plans.put(plan)
            case Assign():
                self._assigned.put(message)
            case Shutdown():
                self._ending = True
                self.plans.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
