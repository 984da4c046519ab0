"""The engine process of a node: ``python -m engine.process FD HEARTBEAT_FD NUM_RANKS``.

FD and HEARTBEAT_FD are its ends of two sockets to the frontend. NUM_RANKS of this host will use torch, 0 if simulated:
it starts their processes and imports torch before the configuration is there.

It builds the ranks that the first message describes, sends Ready or Failed, and runs the step loop until the
frontend sends Shutdown or exits. It ignores SIGINT: the frontend handles Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

import runner
from engine.adapters.build import build_adapters
from engine.channel import Channel, ChannelClosed
from engine.engine import Engine
from engine.executor.build import build_ranks
from engine.executor.idle_step import measure_idle_step
from engine.executor.rank import Ranks
from engine.executor.rank_processes import LaunchedRank, launch_rank
from engine.grammars.workers import GrammarWorkers
from engine.heartbeat_sender import HeartbeatSender
from engine.images.build import build_images
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.connector_scheduler import ConnectorFactory, KVConnectorScheduler
from engine.kv_cache.peer_kv import PeerKV
from engine.kv_events.recorder import recorder_of
from engine.peers.connected_peers import ConnectedPeers
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.speculation.build import build_drafting
from engine.tiers.build import build_tiers
from pdserve.config.node_config import NodeConfig
from pdserve.errors import PdserveError
from pdserve.host.process import EXIT_FAILED, end_with_parent, log_failure
from pdserve.ipc.frames import framed
from pdserve.ipc.messages import Configure, Failed, Heartbeat, Shutdown
from pdserve.logs import chosen_format, set_process_fields, setup_logging

_log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    set_process_fields(process="engine")
    setup_logging("", chosen_format(), name="engine")
    num_ranks = int(argv[2])
    launched = [launch_rank() for _ in range(num_ranks - 1)]
    if num_ranks:
        runner.begin_import()
    channel = Channel(socket.socket(fileno=int(argv[0])))
    try:
        return _serve(channel, socket.socket(fileno=int(argv[1])), launched)
    except ChannelClosed:
        return 0


def _serve(channel: Channel, heartbeats: socket.socket, launched: Sequence[LaunchedRank]) -> int:
    heartbeats.setblocking(False)
    while not (messages := channel.receive(None)):
        pass
    configure, *rest = messages
    if isinstance(configure, Shutdown):
        return 0
    assert isinstance(configure, Configure), configure
    try:
        ranks, ready = build_ranks(configure, channel, launched)
    except Exception as exc:
        if not isinstance(exc, PdserveError):
            log_failure(_log, exc)
        channel.send(Failed.of(exc))
        channel.drain()
        return EXIT_FAILED
    grammars = GrammarWorkers(configure.config.model_dir, configure.config.model, channel.wake)
    if configure.config.costs is None:
        grammars.load()
    scheduler = make_scheduler(configure.config, ranks, grammars, configure.agent)
    scheduler.connector.report.record(recorder_of(configure))
    engine = Engine(scheduler, ranks, channel, configure.config.parallel.pp)
    channel.suspects = engine.suspects
    gc.collect()
    gc.freeze()
    channel.send(ready)
    timeout = configure.config.options.peer_timing.answer_timeout
    send = partial(_send_heartbeat, heartbeats)
    HeartbeatSender(
        engine.loop_timer, send, timeout, ranks.monitors, ranks.waiting_for, num_taken=lambda: channel.num_received
    ).start()
    try:
        engine.handle(rest)
        engine.run()
        ranks.announce_shutdown()
    except ChannelClosed:
        raise
    except Exception as exc:
        log_failure(_log, exc)
        with contextlib.suppress(OSError, ChannelClosed):
            channel.end_with_crash()
        os._exit(EXIT_FAILED)  # at once: closing ranks may hang, and output at exit would follow the error
    finally:
        ranks.close()
    return 0


def _send_heartbeat(sock: socket.socket, heartbeat: Heartbeat) -> None:
    with contextlib.suppress(BlockingIOError):  # the frontend is stopped, and has heartbeats enough
        sock.send(framed(heartbeat))


def make_scheduler(config: NodeConfig, ranks: Ranks, grammars: GrammarWorkers, agent: str) -> Scheduler:
    """Return the scheduler of a node with these ranks. ``agent`` is the connector's name; empty for none."""
    # On a CPU the first decodes tell it soon. With stages, a step of one sequence passes them one after the other.
    measures = config.itl_target is None and config.device.kind == "cuda" and config.parallel.pp == 1
    return Scheduler(
        SchedulerConfig.of_node(
            config,
            ranks.kv_layout,
            ranks.state_layout,
            idle_step=measure_idle_step(ranks) if measures else 0.0,
        ),
        connector=_connector_factory(config, ranks, agent),
        drafting=build_drafting(config),
        images=build_images(config, ranks.kv_layout.block_size),
        adapters=build_adapters(config),
        grammars=grammars,
        clock=time.monotonic,
    )


def _connector_factory(config: NodeConfig, ranks: Ranks, agent: str) -> ConnectorFactory:
    def make(parts: CacheParts) -> KVConnectorScheduler:
        peers = PeerKV()
        layers = config.model.num_kv_layers
        if agent:
            peers = ConnectedPeers(parts, checksum=config.options.checks_kv, num_layers=layers)
        return KVConnectorScheduler(parts, peers, build_tiers(parts, config, ranks.kv_layout, ranks.state_layout))

    return make


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
