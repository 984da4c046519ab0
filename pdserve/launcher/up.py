"""``pdserve up``: prefill nodes, decode nodes and a router on one machine, as child processes."""

from __future__ import annotations

import argparse
import errno
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from pdserve.config.device import find_gpus, node_devices
from pdserve.config.flags import flag_words, node_flags_of, options_from
from pdserve.config.node_config import NodeConfig, NodeOptions
from pdserve.config.pooling import EMBED
from pdserve.config.resolve import resolve
from pdserve.errors import CapacityError, ConfigError, NodeError, PdserveError
from pdserve.launcher.device_assignment import assign_devices, with_parallel_sizes
from pdserve.launcher.startup_display import StartupDisplay, make_display
from pdserve.launcher.supervisor import Changed, Child, Died, Printed, Supervisor
from pdserve.logs import choose_format, set_process_fields
from pdserve.process import EXIT_INTERRUPTED, EXIT_REFUSED, describe_exit, say
from pdserve.rpc.address import probe_port

POLL_SECONDS = 0.1  # longest delay until a signal is noticed
ROUTER_FLAGS = (  # forwarded to the router
    *("api_keys", "tls_cert", "tls_key", "grpc_tls", "trace_sample"),
    *("metrics_port", "metrics_host", "metrics_client_names", "generation_config"),
)
COMMON_FLAGS = ("traces", "log_requests", "drain_timeout")  # forwarded to the router and the nodes
DRAIN_RESERVE = 15.0  # seconds beyond --drain-timeout for leases and process exits
LOCAL = "127.0.0.1"  # nodes listen here


def up(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises NodeError or ConfigError if a child dies. pdserve/cli.py parses ``args``."""
    choose_format(args.log_format)
    set_process_fields(role="up")
    check_port(args.host, args.port)
    plan = FleetPlan.of(args)
    with StopSignals() as stop, Supervisor() as children:
        fleet = LocalFleet(children, plan, args)
        display = make_display(children.children, live=True)
        try:
            watch(children, display, until=lambda: stop.received or fleet.advance())
        finally:
            display.close()
        if stop.received:
            return EXIT_INTERRUPTED
        print(welcome(fleet.url, plan.config, needs_key=args.api_keys is not None), flush=True)
        watch(children, make_display((), live=False), until=lambda: stop.received)
        if not stop.immediate:
            say("draining; a second signal stops at once", level="INFO")
            deadline = time.monotonic() + args.drain_timeout + DRAIN_RESERVE
            children.drain(lambda: stop.immediate or time.monotonic() > deadline)
        say("stopping", level="INFO")
    return 0


class FleetPlan(NamedTuple):
    """The options of all nodes to start, and the resolved configuration of a decode node."""

    prefill: list[NodeOptions]
    decode: list[NodeOptions]
    config: NodeConfig

    @classmethod
    def of(cls, args: argparse.Namespace) -> FleetPlan:
        """Raises ConfigError or CapacityError if some node could not run with these flags."""
        options = options_from(args)
        prefill = with_parallel_sizes(options, args.prefill_pp, args.prefill_tp)
        decode = with_parallel_sizes(options, args.decode_pp, args.decode_tp)
        for each in (prefill, decode):
            config = resolve(each, node_devices(each, each.num_ranks)[0])
        model = {"model": config.model_dir, "served_model_name": config.served_model_name}
        nodes = [msgspec.structs.replace(each, **model) for each in [prefill] * args.prefill + [decode] * args.decode]
        if config.pooling is not None:  # prefill nodes alone serve it
            nodes = nodes[: args.prefill]
        nodes = assign_devices(nodes, len(find_gpus()), config.threads)
        return cls(nodes[: args.prefill], nodes[args.prefill :], config)


class LocalFleet:
    """Start each process as soon as the addresses it needs are known."""

    def __init__(self, children: Supervisor, plan: FleetPlan, args: argparse.Namespace) -> None:
        self._children = children
        self._plan = plan
        self._args = args
        self._prefill = self._spawn_nodes("prefill", plan.prefill, [])
        self._decode: list[Child] = []
        self._router: Child | None = None

    @property
    def url(self) -> str:
        """URL of the router for clients on this machine. The router must be ready."""
        assert self._router is not None
        host, _, port = self._router.address.rpartition(":")
        scheme = "http" if self._args.tls_cert is None else "https"
        return f"{scheme}://{'localhost' if host in ('0.0.0.0', '[::]') else host}:{port}"

    def advance(self) -> bool:
        """Start the processes that can start now. Return True once all are ready."""
        if self._plan.decode and not self._decode and _listening(self._prefill):
            peers = _flags("--prefill", self._prefill)
            self._decode = self._spawn_nodes("decode", self._plan.decode, peers)
        if self._router is None and _listening(self._decode if self._plan.decode else self._prefill):
            self._router = self._spawn_router()
        return self._router is not None and all(child.state == "ready" for child in self._children.children)

    def _spawn_nodes(self, role: str, nodes: list[NodeOptions], flags: list[str]) -> list[Child]:
        flags = ["--host", LOCAL, *self._forwarded(COMMON_FLAGS), *flags]
        names = [role] if len(nodes) == 1 else [f"{role}-{index}" for index in range(len(nodes))]
        return [
            self._children.spawn(name, f"{role}_node", [*node_flags_of(options), *flags])
            for name, options in zip(names, nodes, strict=True)
        ]

    def _spawn_router(self) -> Child:
        peers = _flags("--prefill", self._prefill) + _flags("--decode", self._decode)
        model = [self._plan.config.model_dir, "--served-model-name", self._plan.config.served_model_name]
        address = ["--host", self._args.host, "--port", str(self._args.port)]
        forwarded = self._forwarded((*ROUTER_FLAGS, *COMMON_FLAGS))
        return self._children.spawn("router", "router", [*model, *address, *forwarded, *peers])

    def _forwarded(self, names: Iterable[str]) -> list[str]:
        return [word for name in names for word in flag_words(name, getattr(self._args, name))]


def _listening(children: list[Child]) -> bool:
    return bool(children) and all(child.address for child in children)


def _flags(flag: str, children: list[Child]) -> list[str]:
    return [word for child in children for word in (flag, child.address)]


def watch(children: Supervisor, display: StartupDisplay, until: Callable[[], bool]) -> None:
    """Display the children's events until ``until()``. Raises the error of a child that dies."""
    while not until():
        for event in children.wait(POLL_SECONDS):
            match event:
                case Printed(child, text):
                    display.printed(child, text)
                case Changed(child):
                    display.changed(child)
                    if child.state == "failed":
                        raise death_of(child)
                case Died(child):
                    raise death_of(child)
        display.tick()


def death_of(child: Child) -> PdserveError:
    """Return an error with the exit status, the last message of the child and a remedy."""
    try:
        status = child.process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        status = 1  # it reported a failure and hangs in its exit
    if status == EXIT_REFUSED:
        return ConfigError(f"{child.name}: {child.last_error}")
    return NodeError(f"{child.name} {describe_exit(status)}: {child.last_error}. Hint: {_hint(child, status)}")


def _hint(child: Child, status: int) -> str:
    if status == -signal.SIGKILL or "was killed by SIGKILL" in child.last_error:  # it, its engine or a rank
        return "unless a user killed it, the system ran out of memory: set a smaller --kv-cache-memory"
    if child.state != "ended" or status == 0:
        return f"run `pdserve {child.module.removesuffix('_node')}` alone to see more"
    return "see its last lines above; set PDSERVE_TRACEBACK=1 for a traceback"


class StopSignals:
    """Record stop signals, so that the process stops at a safe point. Only a single SIGTERM lets it drain."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received = False
        self.immediate = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.immediate = self.received or number != signal.SIGTERM
        self.received = True


def check_port(host: str, port: int) -> None:
    """Raise CapacityError unless ``host:port`` is free, before a model is loaded."""
    try:
        probe_port(host, port)
    except socket.gaierror as exc:
        raise ConfigError(
            f"--host {host!r} cannot be resolved ({exc.strerror}); use an address of this machine"
        ) from exc
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise CapacityError(
                f"port {port} on {host} is in use; stop the process that listens there or choose another --port"
            ) from exc
        raise CapacityError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another --host or --port") from exc


def welcome(url: str, config: NodeConfig, needs_key: bool = False) -> str:
    body: dict[str, object] = {"model": config.served_model_name}
    if config.pooling is not None:
        return _welcome_to_vectors(url, config, config.pooling.task, needs_key)
    if has_chat_template(Path(config.model_dir)):
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        path, body["prompt"] = "completions", "Hello"
    body |= {"max_tokens": 32, "stream": True}
    return _example(url, config, path, body, needs_key)


def _welcome_to_vectors(url: str, config: NodeConfig, task: str, needs_key: bool) -> str:
    if task == EMBED:
        body: dict[str, object] = {"model": config.served_model_name, "input": ["Hello", "world"]}
        return _example(url, config, "embeddings", body, needs_key)
    pair = {"query": "capital of France", "documents": ["Paris", "a river"]}
    return _example(url, config, "rerank", {"model": config.served_model_name, **pair}, needs_key)


def _example(url: str, config: NodeConfig, path: str, body: dict[str, object], needs_key: bool) -> str:
    text = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return (
        f"\n{config.served_model_name} is served at {url} (Ctrl-C stops it). Try:\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d '{text}'\n"
    )


def has_chat_template(model_dir: Path) -> bool:
    if (model_dir / "chat_template.jinja").is_file():
        return True
    config = model_dir / "tokenizer_config.json"
    return config.is_file() and "chat_template" in json.loads(config.read_bytes())
