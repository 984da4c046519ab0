"""A host that has ranks of a node, but not its leader: it dials for them, and lives as long as they do.

leader's host                          this host
  engine ◄──── a TCP connection each ──── rank process   (engine/executor/rank_process.py)
                                          rank process
                                              ▲ starts, and ends with them
                                          this process: no front, no port
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from types import FrameType

from engine.executor.multi_host import LocalRanks
from engine.executor.rank_processes import spawn_rank
from engine.executor.rendezvous import dial, hello_of, join
from pdserve.config.device import node_devices
from pdserve.config.node_config import NodeConfig, NodeOptions
from pdserve.config.parallel import RankPosition
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError, NodeError
from pdserve.process import EXIT_ORPHANED, EXIT_REFUSED, StatusWriter

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


def run_ranks(options: NodeOptions, host: LocalRanks, status: StatusWriter) -> int:
    """Run this host's ranks until the leader ends, or a signal comes in a hurry; returns the exit status.

    Where all hosts of a node are told to end, SIGTERM reaches the leader, too: it drains, and then ends all ranks.
    Raises NodeError when the leader does not come, or goes, and when a rank fails; ConfigError when they do not fit.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        config = _join(options, host, status, processes)
        status.ready()
        signal.signal(signal.SIGTERM, _wait_for_leader)
        _attend([config.split.place(rank) for rank in host.ranks], processes, host.leader)
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.kill()
    return 0


def _wait_for_leader(number: int, frame: FrameType | None) -> None:
    """The node ends as one, and needs all of its ranks while it drains."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _log.info("the leader is to end the node; a second signal ends these ranks, and with them the node, at once")


def _join(
    options: NodeOptions, host: LocalRanks, status: StatusWriter, processes: list[subprocess.Popen[bytes]]
) -> NodeConfig:
    """Start each rank with a connection to the leader, who has accepted it."""
    devices = node_devices(options, len(host.ranks))
    config = resolve(options, devices[0])
    threads = max(1, config.threads // len(host.ranks))
    for rank, device in zip(host.ranks, devices, strict=True):
        status.loading(f"looking for the leader at {host.leader}", -1.0)
        with dial(host.leader) as sock:
            join(sock, hello_of(config, rank, device, threads), config.peer_timing)
            processes.append(spawn_rank(sock))
        _log.info("%s belongs to the node at %s", config.split.place(rank), host.leader)
    return config


def _attend(places: list[RankPosition], processes: list[subprocess.Popen[bytes]], leader: str) -> None:
    """Return when the leader has told all ranks to end. Raises what one of them has ended with."""
    running = True
    while running:
        time.sleep(_POLL_SECONDS)
        running = False
        for place, process in zip(places, processes, strict=True):
            status = process.poll()
            running |= status is None
            if status:
                raise _failure(place, status, leader)


def _failure(place: RankPosition, status: int, leader: str) -> Exception:
    if status == EXIT_ORPHANED:
        return NodeError(f"the leader at {leader} has gone")
    if status < 0:
        return NodeError(f"{place} was killed by {signal.Signals(-status).name}")
    kind = ConfigError if status == EXIT_REFUSED else NodeError
    return kind(f"{place} ended with status {status}; its own words are above, or the leader has them")
