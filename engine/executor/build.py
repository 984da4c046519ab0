"""From a configuration to what carries out its steps: one rank, or all of a node's."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

import msgspec

from engine.executor.aggregator import Aggregator
from engine.executor.executor import Executor
from engine.executor.rank import Rank, Ranks
from engine.executor.rank_messages import Assign
from engine.executor.rank_processes import RankChannel, RankProcesses, start_rank
from engine.executor.rendezvous import GATHER_SECONDS, Rendezvous, listen
from engine.ipc.channel import Channel, ChannelClosed
from engine.ipc.messages import Configure, Progress, StartFailed
from pdserve.config.node_config import NodeConfig
from pdserve.process import EXIT_FAILED
from pdserve.records import RankKV
from pdserve.rpc.address import join_address, split_address

_LOOPBACK = "127.0.0.1"


def build_rank(
    config: NodeConfig,
    agent: str,
    meeting: str | socket.socket,
    progress: Callable[[str, float], None],
    on_news: Callable[[], None],
) -> tuple[Rank, RankKV]:
    """Load the rank's part of the model, allocate its KV cache and register it.

    ``agent`` is its connector's name, empty for none; when that has news, ``on_news`` is called, on any thread. Ranks
    find each other at ``meeting``: "host:port", for rank 0 the socket that listens there, "" for one rank.
    """
    import connector
    import runner

    model_runner = runner.build(config, progress, meeting)
    progress("registering KV cache", -1.0)
    kind = "none" if not agent else "nixl" if config.costs is None else "simulated"
    kv_connector = connector.build(kind, agent, config.peer_timing, config.shares, config.rank, config.costs)
    kv = kv_connector.register(model_runner.kv_region, model_runner.kv_layout, on_news)
    return Rank(model_runner, kv_connector), kv


def assemble(configure: Configure, channel: Channel) -> tuple[Ranks, tuple[RankKV, ...]]:
    """All ranks of a node, loaded, and what its peers must know of them; nothing where it has no connector.

    Raises what rank 0 fails with. When another rank fails, now or later, this process ends: the front is told why.
    """

    def progress(stage: str, fraction: float) -> None:
        channel.send(Progress(stage, fraction))

    config = configure.config
    if config.split.num_ranks == 1:
        rank, kv = build_rank(config, configure.agent, "", progress, channel.wake)
        return rank, (kv,) if configure.agent else ()
    links, configs = _call_up(configure, progress)
    agents = [f"{configure.agent}-r{rank}" if configure.agent else "" for rank in range(len(configs))]
    meeting, address = _open_meeting(configure.placement.listen)
    crew = RankProcesses(links, lambda kind, text: _end(channel, kind, text))
    for link, of_rank, agent in zip(links, configs[1:], agents[1:], strict=True):
        link.send(Assign(of_rank, agent, address))
    with crew.blamed_first():
        rank, kv = build_rank(configs[0], agents[0], meeting, progress, channel.wake)
    others = crew.wait_ready()
    executor = Executor(rank, crew, Aggregator(config.split, config.shares), channel.wake)
    return executor, (kv, *(other.kv for other in others)) if configure.agent else ()


def _call_up(
    configure: Configure, progress: Callable[[str, float], None]
) -> tuple[list[RankChannel], list[NodeConfig]]:
    """Connections to all ranks but the first, which is this process; and the node as each rank sees it."""
    config, placement = configure.config, configure.placement
    here, split = len(placement.devices), config.split
    patience = config.peer_timing.answer_timeout
    configs = [
        msgspec.structs.replace(config.for_rank(rank, device), threads=max(1, config.threads // here))
        for rank, device in enumerate(placement.devices)
    ]
    links: list[RankChannel] = []
    if placement.listen:
        missing = range(here, split.num_ranks)
        with listen(placement.listen) as listener:
            progress(f"waiting for ranks {missing.start} … {missing.stop - 1}", -1.0)
            joined = Rendezvous(listener, config, missing).gather(GATHER_SECONDS)
        for rank in missing:
            hello, sock = joined[rank]
            configs.append(
                msgspec.structs.replace(
                    config.for_rank(rank, hello.device), model_dir=hello.model_dir, threads=hello.threads
                )
            )
            links.append(RankChannel(split.place(rank), sock, patience))
    links[:0] = [start_rank(split.place(rank), patience) for rank in range(1, here)]
    return links, configs


def _open_meeting(leader: str) -> tuple[socket.socket, str]:
    """Where ranks find each other, open from now on, so that nobody else can take its port; and its "host:port".

    On the host of ``leader``, where the ranks of other hosts called; "" where there are none.
    """
    host = split_address(leader)[0] if leader else _LOOPBACK
    meeting = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    address, port = meeting.getsockname()[:2]
    return meeting, join_address(address if address == _LOOPBACK else host, port)  # a name may mean another host there


def _end(channel: Channel, kind: str, text: str) -> NoReturn:
    """The node cannot go on without one of its ranks: these are its engine's last words."""
    with contextlib.suppress(OSError, ChannelClosed):  # the front has gone, too
        channel.send(StartFailed(kind, text))
        channel.drain()
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)
