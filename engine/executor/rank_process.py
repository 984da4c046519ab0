"""A rank other than the leader: ``python -m engine.executor.rank_process FD START STOP``.

FD is its end of a socket to the leader. The first rank of a host that is not the leader's digests the weights of that
host's ranks, START … STOP - 1, while it loads its part of the model; for other ranks that range is empty.

    leader ──► reader thread ─orders──► main thread: launch ──steps in flight──► reporter thread ──► leader
               end of stream: exit                               connector events ──►

Three threads, so that a step is launched while the one before it is computed, and so that the leader's end is noticed
while the other threads are stuck in a collective.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import runner
from engine.executor.build import build_rank
from engine.executor.rank import Pending, Rank
from engine.executor.rank_messages import Assign, ChangeRank, FromRank, RankOutput, RankReady, Step, ToRank, Transfers
from engine.heartbeat_sender import HeartbeatSender, LoopTimer
from pdserve.config.config_with_weights import host_digests
from pdserve.errors import CheckpointError
from pdserve.host.process import EXIT_ORPHANED, end_with_parent, exit_status, log_failure
from pdserve.ipc.frames import Frames, framed
from pdserve.ipc.messages import Failed, Shutdown
from pdserve.logs import chosen_format, set_process_fields, setup_logging
from pdserve.records import EMPTY_OUTPUT

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_DIGEST_INTERVAL = 1e-3  # seconds between polls for digests


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    runner.begin_import()
    leader = LeaderConnection(socket.socket(fileno=int(argv[0])))
    assign = leader.wait_assign()
    name = str(assign.config.position)
    set_process_fields(process=name)
    setup_logging("", chosen_format(), name=name)
    host = range(int(argv[1]), int(argv[2]))
    in_flight: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()  # None: poll the connector
    try:
        digests = ThreadPoolExecutor(1, "digests").submit(host_digests, assign.config, host) if host else None
        rank, kv = build_rank(
            assign.config,
            assign.agent,
            assign.rendezvous,
            lambda stage, fraction: None,
            lambda: in_flight.put(None),
            assign.peer,
        )
        gc.collect()
        gc.freeze()
        own_digests = None if digests is None else digests.result()
        leader.send(RankReady(kv, rank.kv_layout, rank.offered_weights, rank.loaded_files, own_digests))
        HeartbeatSender(LoopTimer(), leader.send, assign.config.options.peer_timing.answer_timeout).start()
        threading.Thread(target=_report, args=(rank, in_flight, leader), name="reporter", daemon=True).start()
        while (order := leader.orders.get()) is not None:
            match order:
                case Step(plan):
                    in_flight.put(rank.launch(plan))
                case Transfers(orders):
                    rank.start_transfers(orders)
                    in_flight.put(None)  # the reporter looks for digests from now on
                case ChangeRank():
                    _change_weights(rank, order)
        rank.close()
    except Exception as exc:
        leader.fail(exc)
    return 0


def _change_weights(rank: Rank, order: ChangeRank) -> None:
    try:
        if order.only_check:
            rank.check_weights(order.change)
        else:
            rank.change_weights(order.change)
    except CheckpointError as exc:  # rank 0 raises it, too
        _log.info("%s", exc)


def _report(rank: Rank, in_flight: queue.SimpleQueue[Pending | None], leader: LeaderConnection) -> None:
    """Send the output of each step, in order, and connector events between steps."""
    try:
        while True:
            pending = None
            with contextlib.suppress(queue.Empty):
                pending = in_flight.get(timeout=_DIGEST_INTERVAL if rank.digesting else None)
            if pending is not None:
                leader.send(RankOutput(pending()))
            elif (output := rank.poll()) is not EMPTY_OUTPUT:
                leader.send(RankOutput(output))
    except Exception as exc:
        leader.fail(exc)


class LeaderConnection:
    """A rank's connection to the leader. The process exits when it ends."""

    def __init__(self, sock: socket.socket) -> None:
        self.orders: queue.SimpleQueue[Step | Transfers | ChangeRank | None] = queue.SimpleQueue()  # None: exit
        self._socket = sock
        self._sending = threading.Lock()
        self._assigned: queue.SimpleQueue[Assign] = queue.SimpleQueue()
        self._shutting_down = False
        threading.Thread(target=self._read, name="leader reader", daemon=True).start()

    def wait_assign(self) -> Assign:
        return self._assigned.get()

    def send(self, message: FromRank) -> None:
        """Send from any thread; blocks while the leader does not read."""
        frame = framed(message)
        with self._sending:
            self._socket.sendall(frame)

    def fail(self, error: Exception) -> NoReturn:
        log_failure(_log, error)
        frame = framed(Failed.of(error))
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:  # the leader has gone
                os._exit(EXIT_ORPHANED)
            os._exit(exit_status(error))

    def _read(self) -> None:
        frames: Frames[ToRank] = Frames(ToRank)
        try:
            while data := self._socket.recv(_READ_BYTES):
                for message in frames.cut(data):
                    self._receive(message)
        except OSError:
            pass  # handled below, like the end of the stream
        except Exception:
            _log.exception("a message of the leader cannot be decoded; run one version of pdserve on all hosts")
        with self._sending:  # ``fail`` exits with its own status while it holds the lock
            os._exit(0 if self._shutting_down else EXIT_ORPHANED)

    def _receive(self, message: ToRank) -> None:
        match message:
            case Step() | Transfers() | ChangeRank():
                self.orders.put(message)
            case Assign():
                self._assigned.put(message)
            case Shutdown():
                self._shutting_down = True
                self.orders.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
