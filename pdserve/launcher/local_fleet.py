"""The processes of ``pdserve up``: their options, and the order in which they start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pdserve.config.device import find_gpus, node_devices
from pdserve.config.flags import flag_words, node_flags_of, options_from
from pdserve.config.node_config import NodeConfig, NodeOptions
from pdserve.config.resolve import resolve
from pdserve.launcher.device_assignment import assign_devices, gpus_of, with_parallel_sizes
from pdserve.launcher.supervisor import Child, Supervisor

ROUTER_FLAGS = (  # forwarded to the router
    *("api_keys", "tls_cert", "tls_key", "grpc_tls", "trace_sample"),
    *("metrics_port", "metrics_host", "metrics_client_names", "generation_config"),
)
COMMON_FLAGS = ("traces", "log_requests", "drain_timeout")  # forwarded to the router and the nodes
LOCAL = "127.0.0.1"  # nodes listen here


class FleetPlan(NamedTuple):
    """The options of all nodes to start, and the resolved configuration of one of them."""

    prefill: list[NodeOptions]
    decode: list[NodeOptions]
    config: NodeConfig

    @classmethod
    def of(cls, args: argparse.Namespace) -> FleetPlan:
        """Raises ConfigError or CapacityError if some node could not run with these flags."""
        options = options_from(args)
        prefill = with_parallel_sizes(options, args.prefill_pp, args.prefill_tp)
        decode = with_parallel_sizes(options, args.decode_pp, args.decode_tp)
        config = _resolve(prefill)
        model = {"model": config.model_dir, "served_model_name": config.served_model_name}
        nodes = [msgspec.structs.replace(each, **model) for each in [prefill] * args.prefill + [decode] * args.decode]
        if config.pooling is not None:  # prefill nodes alone serve it
            nodes = nodes[: args.prefill]
        nodes = assign_devices(nodes, len(find_gpus()), len(os.sched_getaffinity(0)))
        for node in nodes:
            _resolve(node)
        return cls(nodes[: args.prefill], nodes[args.prefill :], config)


def _resolve(options: NodeOptions) -> NodeConfig:
    return resolve(options, node_devices(options, options.num_ranks)[0])


@dataclass
class Member:
    """A process of the fleet."""

    name: str
    module: str
    flags: list[str]
    device: str = ""  # where a node runs, for users
    gpus: range = range(0)
    child: Child | None = None

    @property
    def is_loading(self) -> bool:
        return self.child is not None and self.child.state in ("starting", "loading")


class LocalFleet:
    """Start each process as soon as the addresses it needs are known.

    Nodes that share a GPU start one after the other, so that each measures its own memory only.
    """

    def __init__(self, children: Supervisor, plan: FleetPlan, args: argparse.Namespace) -> None:
        self._children = children
        self._plan = plan
        self._args = args
        self.prefill = self._nodes("prefill", plan.prefill)
        self.decode = self._nodes("decode", plan.decode)
        self._router = Member("router", "router", self._router_flags())

    @property
    def nodes(self) -> list[Member]:
        return [*self.prefill, *self.decode]

    @property
    def url(self) -> str:
        """URL of the router for clients on this machine. The router must be ready."""
        assert self._router.child is not None
        host, _, port = self._router.child.address.rpartition(":")
        scheme = "http" if self._args.tls_cert is None else "https"
        return f"{scheme}://{'localhost' if host in ('0.0.0.0', '[::]') else host}:{port}"

    def advance(self) -> bool:
        """Start the processes that can start now. Return True once all are ready."""
        self._start(self.prefill, [])
        if _listening(self.prefill):
            self._start(self.decode, _flags("--prefill", self.prefill))
        if _listening(self.nodes):
            peers = _flags("--prefill", self.prefill) + _flags("--decode", self.decode)
            self._start([self._router], peers)
        members = [*self.nodes, self._router]
        return all(member.child is not None and member.child.state == "ready" for member in members)

    def _start(self, members: Sequence[Member], peers: list[str]) -> None:
        for member in members:
            if member.child is None and not self._waits_for_gpu(member):
                member.child = self._children.spawn(member.name, member.module, [*member.flags, *peers])

    def _waits_for_gpu(self, member: Member) -> bool:
        """Return whether another node on one of its GPUs loads."""
        return any(other.is_loading and not set(member.gpus).isdisjoint(other.gpus) for other in self.nodes)

    def _nodes(self, role: str, nodes: list[NodeOptions]) -> list[Member]:
        flags = ["--host", LOCAL, *self._forwarded(COMMON_FLAGS)]
        names = [role] if len(nodes) == 1 else [f"{role}-{index}" for index in range(len(nodes))]
        return [
            Member(name, f"{role}_node", [*node_flags_of(options), *flags], _device(options), gpus_of(options))
            for name, options in zip(names, nodes, strict=True)
        ]

    def _router_flags(self) -> list[str]:
        model = [self._plan.config.model_dir, "--served-model-name", self._plan.config.served_model_name]
        address = ["--host", self._args.host, "--port", str(self._args.port)]
        return [*model, *address, *self._forwarded((*ROUTER_FLAGS, *COMMON_FLAGS))]

    def _forwarded(self, names: Iterable[str]) -> list[str]:
        return [word for name in names for word in flag_words(name, getattr(self._args, name))]


def _device(options: NodeOptions) -> str:
    """Return where a node runs, and its share of a GPU's memory if it does not have all of it."""
    if options.simulated:
        return "simulated"
    share = f" ({options.gpu_memory_utilization:.0%} of the memory)" if options.gpu_memory_utilization else ""
    return ", ".join(f"cuda:{gpu}{share}" for gpu in gpus_of(options)) or "cpu"


def _listening(members: Sequence[Member]) -> bool:
    return all(member.child is not None and member.child.address for member in members)


def _flags(flag: str, members: Sequence[Member]) -> list[str]:
    return [word for member in members if member.child is not None for word in (flag, member.child.address)]
