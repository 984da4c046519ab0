"""Runs a host's ranks of a node whose leader is on another host.

leader's host                          this host
  engine ◄──── a TCP connection each ──── rank process   (engine/executor/rank_process.py)
                                          rank process
                                              ▲ starts them, and exits with them
                                          this process: no frontend, no port
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from types import FrameType

from engine.executor.rank_processes import spawn_rank
from engine.executor.rendezvous import connect_leader, join, make_hello
from pdserve.config.device import node_devices
from pdserve.config.kernels.background_compile import compiling_beside
from pdserve.config.multi_host import LocalRanks
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import RankPosition
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError, NodeError
from pdserve.host.process import EXIT_ORPHANED, EXIT_REFUSED, StatusWriter, describe_exit

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


def run_ranks(options: NodeOptions, local: LocalRanks, status: StatusWriter) -> int:
    """Run this host's ranks until the leader or a second signal ends them; return the exit status.

    Raises NodeError when the leader or a rank fails, ConfigError when the leader rejects a rank.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        config = _join(options, local, status, processes)
        status.ready()
        signal.signal(signal.SIGTERM, _wait_for_leader)
        with compiling_beside(config):
            _wait([config.parallel.position(rank) for rank in local.ranks], processes, local.leader)
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.kill()
    return 0


def _wait_for_leader(number: int, frame: FrameType | None) -> None:
    """Keep running: the leader receives SIGTERM too, needs all ranks while it drains, and ends them afterwards."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _log.info("waiting for the leader to end the node; a second signal ends these ranks and the node at once")


def _join(
    options: NodeOptions, local: LocalRanks, status: StatusWriter, processes: list[subprocess.Popen[bytes]]
) -> NodeConfig:
    """Start each rank with a connection to the leader, which has accepted it."""
    devices = node_devices(options, len(local.ranks))
    config = resolve(options, devices[0])
    threads = max(1, config.threads // len(local.ranks))
    for rank, device in zip(local.ranks, devices, strict=True):
        status.loading(f"connecting to the leader at {local.leader}", -1.0)
        with connect_leader(local.leader, local.timeout) as sock:
            join(sock, make_hello(config, rank, device, threads), config.options.peer_timing)
            processes.append(spawn_rank(sock, local.ranks if rank == local.ranks.start else range(0)))
        _log.info("%s has joined the node at %s", config.parallel.position(rank), local.leader)
    return config


def _wait(ranks: list[RankPosition], processes: list[subprocess.Popen[bytes]], leader: str) -> None:
    """Return when all ranks have exited with status 0. Raises the error of the first that has not."""
    running = True
    while running:
        time.sleep(_POLL_SECONDS)
        running = False
        for rank, process in zip(ranks, processes, strict=True):
            status = process.poll()
            running |= status is None
            if status:
                raise _exit_error(rank, status, leader)


def _exit_error(rank: RankPosition, status: int, leader: str) -> Exception:
    if status == EXIT_ORPHANED:
        return NodeError(f"the leader at {leader} has gone")
    if status < 0:
        return NodeError(f"{rank} {describe_exit(status)}")
    kind = ConfigError if status == EXIT_REFUSED else NodeError
    return kind(f"{rank} {describe_exit(status)}; its error is above, or in the leader's log")
