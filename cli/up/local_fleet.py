"""The processes of ``pdserve up``: their options, the order in which they start, and their restarts."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cli.up.device_assignment import assign_devices, gpus_of, nodes_on_gpus, with_parallel_sizes
from cli.up.flags import flag_of_split_roles, role_words
from cli.up.restarts import Restarts
from cli.up.supervisor import Child, Supervisor
from pdserve.config.device import find_gpus, node_devices
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions, node_options_from, node_words
from pdserve.config.resolve import resolve
from pdserve.host.cpus import usable_cpus

LOCAL = "127.0.0.1"  # nodes listen here


class FleetPlan(NamedTuple):
    """The options of all nodes to start, and the resolved configuration of one of them."""

    prefill: list[NodeOptions]
    decode: list[NodeOptions]
    elastic: list[NodeOptions]  # nodes of both roles
    config: NodeConfig

    @classmethod
    def of(cls, args: argparse.Namespace) -> FleetPlan:
        """Raises ConfigError or CapacityError if some node could not run with these flags."""
        options = node_options_from(args)
        gpus = len(find_gpus())
        on_gpus = nodes_on_gpus(options, gpus)
        has_both_roles = args.elastic or args.nodes or (on_gpus and flag_of_split_roles(args) is None)
        prefill = [with_parallel_sizes(options, args.prefill_pp, args.prefill_tp)] * (args.prefill or 1)
        decode = [with_parallel_sizes(options, args.decode_pp, args.decode_tp)] * (args.decode or 1)
        elastic = [options] * (args.nodes or on_gpus or 2) if has_both_roles else []
        config = _resolve(elastic[0] if elastic else prefill[0])
        if config.pooling is not None:  # prefill nodes alone serve it
            prefill = elastic or prefill
            decode = []
            elastic = []
        elif elastic:
            prefill = []
            decode = []
        model = {"model": config.model_dir, "served_model_name": config.served_model_name}
        nodes = [msgspec.structs.replace(node, **model) for node in (*prefill, *decode, *elastic)]
        nodes = assign_devices(nodes, gpus, usable_cpus())
        for node in nodes:
            _resolve(node)
        first = len(prefill)
        last = len(prefill) + len(decode)
        return cls(nodes[:first], nodes[first:last], nodes[last:], config)


def _resolve(options: NodeOptions) -> NodeConfig:
    return resolve(options, node_devices(options, options.num_ranks)[0])


@dataclass
class Member:
    """A process of the fleet. It keeps its port when it starts again, so that the others find it."""

    name: str
    module: str
    flags: list[str]
    device: str = ""  # device of a node, for users
    gpus: range = range(0)
    address: str = ""  # host:port, once it has listened
    child: Child | None = None
    restarts: Restarts = field(default_factory=Restarts)

    @property
    def is_loading(self) -> bool:
        return self.child is not None and self.child.state in ("starting", "loading")

    @property
    def is_ready(self) -> bool:
        return self.child is not None and self.child.state == "ready"


class LocalFleet:
    """Start each process as soon as those it needs listen, and again after it has died.

    Ports of nodes are chosen before they start, because each may read from all others and needs their addresses.
    Nodes that share a GPU start one after the other, so that their trial runs do not compete for it.
    """

    def __init__(self, children: Supervisor, plan: FleetPlan, args: argparse.Namespace) -> None:
        self._children = children
        self._scheme = "http" if args.tls_cert is None else "https"
        self._prefill = _members("prefill", plan.prefill, args)
        self._decode = _members("decode", plan.decode, args)
        model = [plan.config.model_dir, "--served-model-name", plan.config.served_model_name, *args.aliases]
        self._elastic = _members("elastic", plan.elastic, args)
        for node, port in zip(self.nodes, _free_ports(len(self.nodes)), strict=True):
            node.address = f"{LOCAL}:{port}"
        self._pools = plan.config.pooling is not None
        self._router = Member("router", "router", [*model, *role_words("router", args)])

    @property
    def nodes(self) -> list[Member]:
        return [*self._prefill, *self._decode, *self._elastic]

    @property
    def url(self) -> str:
        """URL of the router for clients on this machine. The router must have been ready."""
        host, _, port = self._router.address.rpartition(":")
        return f"{self._scheme}://{'localhost' if host in ('0.0.0.0', '[::]') else host}:{port}"

    def advance(self) -> bool:
        """Start the processes that can start now. Return True once all are ready."""
        members = [*self.nodes, self._router]
        for member in members:
            if member.child is not None and member.child.address:
                member.address = member.child.address
        others = [] if self._pools else [*_several(self._prefill), *self._decode]
        self._start(self._prefill, _flags("--kv-source", others))
        if _listening(self._prefill):
            sources = [*_flags("--prefill", self._prefill), *_flags("--kv-source", _several(self._decode))]
            self._start(self._decode, sources)
        self._start(self._elastic, _flags("--prefill", self._elastic))
        if _listening(self.nodes):
            roles = {"--prefill": self._prefill, "--decode": self._decode, "--node": self._elastic}
            self._start([self._router], [word for flag, nodes in roles.items() for word in _flags(flag, nodes)])
        return all(member.is_ready for member in members)

    def restart(self, child: Child, now: float) -> float:
        """Start a process that died again, later. Return the delay in seconds; 0 if it has failed too often."""
        member = next(member for member in [*self.nodes, self._router] if member.child is child)
        may = member.restarts.died(now, now - child.ready_at if child.ready_at else 0.0)
        return member.restarts.delay if may else 0.0

    def _start(self, members: Sequence[Member], peers: list[str]) -> None:
        for member in members:
            if self._waits_for_gpu(member):
                continue
            words = [*member.flags, *peers, *_port_of(member)]
            if member.child is None:
                member.child = self._children.spawn(member.name, member.module, words)
            elif member.child.state == "ended" and time.monotonic() >= member.restarts.due:
                member.child = self._children.replace(member.child, words)

    def _waits_for_gpu(self, member: Member) -> bool:
        """Return whether another node on one of its GPUs loads."""
        return any(other.is_loading and not set(member.gpus).isdisjoint(other.gpus) for other in self.nodes)


def _members(role: str, nodes: list[NodeOptions], args: argparse.Namespace) -> list[Member]:
    flags = ["--host", LOCAL, *role_words(role, args)]
    name = "node" if role == "elastic" else role
    names = [name] if len(nodes) == 1 else [f"{name}-{index}" for index in range(len(nodes))]
    return [
        Member(name, f"{role}_node", [*node_words(options), *flags], _device(options), gpus_of(options))
        for name, options in zip(names, nodes, strict=True)
    ]


def _device(options: NodeOptions) -> str:
    """Return where a node runs, and its share of a GPU's memory if it does not have all of it."""
    if options.simulated:
        return "simulated"
    share = f" ({options.gpu_memory_utilization:.0%} of the memory)" if options.gpu_memory_utilization else ""
    return ", ".join(f"cuda:{gpu}{share}" for gpu in gpus_of(options)) or "cpu"


def _free_ports(number: int) -> list[int]:
    with ExitStack() as probes:
        servers = [probes.enter_context(socket.create_server((LOCAL, 0))) for _ in range(number)]
        return [int(server.getsockname()[1]) for server in servers]


def _port_of(member: Member) -> list[str]:
    return ["--port", member.address.rpartition(":")[2]] if member.address else []


def _listening(members: Sequence[Member]) -> bool:
    return all(member.child is not None and member.child.address for member in members)


def _several(members: Sequence[Member]) -> Sequence[Member]:
    """Return nodes that may read from each other: none, if there is one."""
    return members if len(members) > 1 else ()


def _flags(flag: str, members: Sequence[Member]) -> list[str]:
    return [word for member in members for word in (flag, member.address)]
