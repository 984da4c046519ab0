"""Builds the ranks that execute a node's steps from its configuration: one rank, or an Executor over several."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from engine.channel import Channel, ChannelClosed
from engine.executor.aggregator import OutputAggregator
from engine.executor.executor import Executor
from engine.executor.rank import Rank, Ranks
from engine.executor.rank_messages import Assign, Hello, RankReady
from engine.executor.rank_processes import Failure, LaunchedRank, RankChannel, RankProcesses
from engine.executor.rendezvous import JoinedRank, Rendezvous, listen
from pdserve.checkpoint.file_states import check_same_files
from pdserve.config.kernels.flashinfer_hosts import without_flashinfer
from pdserve.config.kernels.triton_hosts import without_triton
from pdserve.config.node_config import NodeConfig
from pdserve.config.resolution.host_kv import host_room
from pdserve.errors import CapacityError
from pdserve.host.process import EXIT_FAILED
from pdserve.ipc.frames import framed
from pdserve.ipc.messages import Configure, Failed, Progress, Ready
from pdserve.kv.states import RankStates
from pdserve.protocols import ModelRunner, WeightSource
from pdserve.records import RankKV
from pdserve.rpc.address import join_address, split_address
from pdserve.weights.change import HostDigests
from pdserve.weights.sharing import RankWeights, WeightPeer

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


def build_rank(
    config: NodeConfig,
    agent: str,
    rendezvous: str | socket.socket,
    progress: Callable[[str, float], None],
    on_events: Callable[[], None],
    peer: WeightPeer | None = None,
) -> tuple[Rank, RankKV]:
    """Load the rank's part of the model, allocate its KV cache and register it.

    Read tensors from ``peer`` where it has them. ``agent`` is the connector's name, empty for none; ``on_events`` is
    called on any thread when it has events. ``rendezvous`` is the host:port of torch.distributed, for rank 0 the socket
    that listens there, "" for one rank.
    """
    import connector
    import runner
    from connector.setup import ConnectorSetup

    progress("importing libraries", -1.0)
    nixl = None
    if config.device.kind == "cuda" and _uses_nixl(config, agent):
        nixl = connector.start_early(config.device.index, config.options.peer_timing)
    back_end = connector.load(config.options.connector if agent else "none")  # an unknown one fails before weights load
    reader = None if peer is None else connector.weight_reader(peer, config.options.peer_timing)
    runner.prepare(config)
    if nixl is not None:
        nixl.join()
    model_runner = runner.build(config, progress, rendezvous, reader)
    progress("registering KV cache", -1.0)
    states = _rank_states(config, model_runner)
    setup = ConnectorSetup(agent, config.options.peer_timing, config.shares, config.rank, config.costs, states)
    kv_connector = back_end(setup)
    kv = kv_connector.register(model_runner.kv_region, model_runner.kv_layout, on_events)
    host_memory = disk = None
    if config.options.host_kv_memory:
        layout = model_runner.kv_layout
        room = host_room(config, layout, model_runner.state_layout)
        host_memory = connector.host_memory(room, model_runner.kv_region, layout, setup, on_events)
        if config.options.disk_kv_size is not None:
            disk = connector.disk_kv(config.disk_kv, config.options.disk_kv_size, host_memory, layout, setup, on_events)
    return Rank(model_runner, kv_connector, _offer_weights(config, model_runner), host_memory, disk, on_events), kv


def _rank_states(config: NodeConfig, model_runner: ModelRunner) -> RankStates | None:
    region = model_runner.state_region
    layout = model_runner.state_layout
    share = config.state_share
    return None if region is None or layout is None or share is None else RankStates(region, layout, share)


def _uses_nixl(config: NodeConfig, agent: str) -> bool:
    """Whether KV caches or weights are read over NIXL, here or by peers."""
    return config.options.load_from != "disk" or (bool(agent) and config.options.connector == "nixl")


def _offer_weights(config: NodeConfig, model_runner: ModelRunner) -> WeightSource | None:
    """Offer the rank's tensors to nodes that start, unless the node loads from the disk only."""
    if config.options.load_from == "disk":
        return None
    import connector

    memory = model_runner.offered_weights()
    if not memory.parts:
        return None
    try:
        return connector.offer_weights(memory, config.options.peer_timing)
    except CapacityError as exc:
        _log.warning("weights are not offered to peers: %s", exc)
        return None


def build_ranks(configure: Configure, channel: Channel, launched: Sequence[LaunchedRank]) -> tuple[Ranks, Ready]:
    """Load all ranks of a node. Return them, and their description for the frontend.

    ``launched`` are the processes of this host's other ranks. Raises the error of a node's only rank. When one of
    several ranks fails, now or later, this process sends the frontend the error and exits.
    """

    def progress(stage: str, fraction: float) -> None:
        channel.send(Progress(stage, fraction))

    config = configure.config
    if config.parallel.num_ranks == 1:
        rank, kv = build_rank(config, configure.agent, "", progress, channel.wake, configure.peer)
        own = (kv,) if configure.agent else ()
        return rank, Ready(rank.kv_layout, own, config.decision, _offers(rank.offered_weights), (rank.loaded_files,))
    channels, configs = _assign_ranks(configure, launched, progress)
    agents = [f"{configure.agent}-r{rank}" if configure.agent else "" for rank in range(len(configs))]
    rendezvous, address = _open_rendezvous(configure.placement.listen)
    others = RankProcesses(config.parallel.position(0), channels, lambda failure: _exit(channel, failure))
    for other, rank_config, agent in zip(channels, configs[1:], agents[1:], strict=True):
        other.send(framed(Assign(rank_config, agent, address, configure.peer)))
    with others.reporting_own_failure():
        rank, kv = build_rank(configs[0], agents[0], rendezvous, progress, channel.wake, configure.peer)
    ready = others.wait_ready()
    executor = Executor(rank, others, OutputAggregator(config.parallel, config.shares), channel.wake)
    kvs = (kv, *(other.kv for other in ready)) if configure.agent else ()
    weights = _offers(rank.offered_weights, *(other.weights for other in ready))
    num_local = len(configure.placement.devices)
    loaded = (rank.loaded_files, *(other.loaded_files for other in ready[: num_local - 1]))
    digests = _digests_of_hosts(ready[num_local - 1 :], configs[num_local:])
    return executor, Ready(executor.kv_layout, kvs, configs[0].decision, weights, loaded, digests)


def _digests_of_hosts(ranks: Sequence[RankReady], configs: Sequence[NodeConfig]) -> tuple[HostDigests, ...]:
    """Return the digests of the other hosts' weights.

    Raises CheckpointError if a rank has loaded other files than those digested on its host.
    """
    hosts: list[HostDigests] = []
    for rank, config in zip(ranks, configs, strict=True):
        hosts += () if rank.digests is None else (rank.digests,)
        check_same_files(config.model_dir, rank.loaded_files, hosts[-1].files)
    return tuple(hosts)


def _offers(*ranks: RankWeights | None) -> tuple[RankWeights, ...]:
    return tuple(rank for rank in ranks if rank is not None)


def config_for_hosts(config: NodeConfig, hellos: Sequence[Hello]) -> NodeConfig:
    """Return the configuration that ranks on all hosts can run, and log how it differs. Raises ConfigError."""
    problems = {f"rank {hello.rank} on {hello.host}": hello.triton_problem for hello in hellos if hello.triton_problem}
    common = without_triton(config, problems)
    if common.decision != config.decision:
        _log.warning("runner %s: %s", common.decision.runner, "; ".join(common.decision.reasons))
    uncompiled = {hello.host: hello.flashinfer_problem for hello in hellos if hello.flashinfer_problem}
    with_kernels = without_flashinfer(common, uncompiled)
    if with_kernels != common:
        reasons = "; ".join(f"{host}: {problem}" for host, problem in uncompiled.items())
        _log.info("attention_backend=%s: %s", with_kernels.attention_backend, reasons)
    return with_kernels


def _assign_ranks(
    configure: Configure, launched: Sequence[LaunchedRank], progress: Callable[[str, float], None]
) -> tuple[list[RankChannel], list[NodeConfig]]:
    """Return connections to all ranks but the first, which is this process, and the configuration of each rank."""
    config = configure.config
    placement = configure.placement
    num_local = len(placement.devices)
    parallel = config.parallel
    timeout = config.options.peer_timing.answer_timeout
    joined: dict[int, JoinedRank] = {}
    if placement.listen:
        missing = range(num_local, parallel.num_ranks)
        end = time.monotonic() + placement.rendezvous_timeout
        progress(f"listening on {placement.listen}", -1.0)
        with listen(placement.listen, placement.rendezvous_timeout) as listener:
            progress(f"waiting for ranks {missing.start} … {missing.stop - 1}", -1.0)
            joined = Rendezvous(listener, config, missing).gather(max(0.0, end - time.monotonic()))
        config = config_for_hosts(config, [joined[rank][0] for rank in missing])
    configs = [
        msgspec.structs.replace(config.for_rank(rank, device), threads=max(1, config.threads // num_local))
        for rank, device in enumerate(placement.devices)
    ]
    remote: list[RankChannel] = []
    for rank, (hello, sock) in sorted(joined.items()):
        own = config.for_rank(rank, hello.device)
        theirs = {name: getattr(hello, name) for name in ("model_dir", "draft_dir", "threads")}
        configs.append(msgspec.structs.replace(own, **theirs))
        remote.append(RankChannel(parallel.position(rank), sock, timeout))
    local = [
        RankChannel(parallel.position(rank), sock, timeout, process)
        for rank, (process, sock) in zip(range(1, num_local), launched, strict=True)
    ]
    return local + remote, configs


def _open_rendezvous(leader: str) -> tuple[socket.socket, str]:
    """Open the socket of torch.distributed's store, so that its port stays ours; return it with its host:port.

    It is on the host of ``leader``, where ranks of other hosts connect; "" if there are none.
    """
    host = split_address(leader)[0] if leader else _LOOPBACK
    sock = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    address, port = sock.getsockname()[:2]
    return sock, join_address(address if address == _LOOPBACK else host, port)  # a name may mean another host there


def _exit(channel: Channel, failure: Failure) -> NoReturn:
    with contextlib.suppress(OSError, ChannelClosed):  # the frontend has gone too
        channel.send(Failed(failure.error, failure.message))
        channel.end_with_crash(in_step=failure.crashed)
    print(failure.message, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)
