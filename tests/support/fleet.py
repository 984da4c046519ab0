"""Real processes for tests: prefill nodes, decode nodes and a router, started as ``pdserve up`` starts them.

with start_fleet(checkpoint, prefill_flags=["--block-size", "8"]) as fleet:
    fleet.complete([1, 2, 3], max_tokens=8)
    fleet.prefill[0].kill()
    fleet.decode[0].wait_idle()
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import grpc
import psutil
from machine import patience

from cli.up.supervisor import Child, Supervisor
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.runner_oracle import VARIABLE
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.timeouts import DEFAULT_TIMING

START_SECONDS = 90.0
MODEL_NAME = "test-model"

#: Two cores serve the whole suite, and a small cache starts quickly.
NODE_FLAGS = ("--served-model-name", MODEL_NAME, "--threads", "1", "--kv-cache-memory", "64MiB", "--device", "cpu")

NO_VARIABLES: Mapping[str, str] = {}

#: Variables that force a runner on a node, by its name; V2 runs in Triton's interpreter.
RUNNER_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "V1": {VARIABLE: "0"},
    "V2": {VARIABLE: "1", "TRITON_INTERPRET": "1"},
}


class Process:
    """One process of a fleet."""

    def __init__(self, fleet: Fleet, child: Child, environ: Mapping[str, str] = NO_VARIABLES) -> None:
        self._fleet = fleet
        self.child = child
        self.environ = environ  # added to the environment of this process

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def address(self) -> str:
        return self.child.address

    @property
    def pid(self) -> int:
        return self.child.process.pid

    @property
    def output(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.child.last_lines)

    def kill(self) -> None:
        """Send SIGKILL to the frontend process only; the engine must detect this and end by itself."""
        self.signal(signal.SIGKILL)
        with suppress(ProcessLookupError):  # frontend and engine have already ended
            os.killpg(self.pid, signal.SIGCONT)
        self.wait_ended(5.0)

    def wait_ended(self, seconds: float) -> None:
        """Wait until the frontend process has ended for any reason."""
        self._fleet.wait_until(lambda: self.child.state == "ended", seconds)

    def respawn(self) -> None:
        """Start an ended process again at the same address, with the same flags and variables."""
        self._fleet.respawn(self)

    def signal(self, number: int) -> None:
        self.child.process.send_signal(number)

    def signal_engine(self, number: int) -> None:
        """Send a signal to the node's engine process only."""
        for child in psutil.Process(self.pid).children():
            child.send_signal(number)


class NodeCalls(ABC):
    """Calls of a node's gRPC services."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def address(self) -> str: ...

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    def status(self) -> pb.NodeStatus:
        with self.channel() as channel:
            return pb_grpc.NodeStub(channel).Status(pb.StatusRequest(), timeout=patience(5.0))

    def describe(self) -> pb.NodeDescription:
        with self.channel() as channel:
            return pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=patience(5.0))

    def counter(self, name: str) -> float:
        """Return the sum over all labels of the counter ``pdserve_{name}_total`` in the node's status."""
        values = [
            value for key, value in self.status().counters.items() if key.split("{")[0] == f"pdserve_{name}_total"
        ]
        assert values, f"{self.name} has no counter {name}"
        return sum(values)

    def wait_idle(self, seconds: float = 10.0) -> pb.NodeStatus:
        """Wait until no block is held, leased or quarantined. Check each time that the blocks add up to the total."""
        start = time.monotonic()
        while True:
            status = self.status()
            used = status.held_blocks + status.leased_blocks + status.quarantined_blocks
            assert status.free_blocks + used == status.total_blocks, status
            if used == 0 and status.waiting + status.reading + status.running + status.paused == 0:
                return status
            assert time.monotonic() < start + patience(seconds), f"{self.name} still holds blocks: {status}"
            time.sleep(0.05)


#: Parts of a node that ``stop`` accepts, beside "rank 1", "rank 2" …; the engine process is rank 0.
PARTS = ("node", "frontend", "engine")


class NodeProcess(Process, NodeCalls):
    """A prefill or decode node."""

    def __init__(self, fleet: Fleet, child: Child, environ: Mapping[str, str]) -> None:
        super().__init__(fleet, child, environ)
        self._stops: list[tuple[str, list[psutil.Process]]] = []  # stopped parts with their processes

    def restart(self) -> None:
        """Respawn the node and wait until the fleet is ready."""
        self.respawn()
        self._fleet.wait_ready()

    def respawn(self) -> None:
        self._stops.clear()
        super().respawn()

    def stop(self, part: str) -> None:
        """Send SIGSTOP to a part of the node and wait until it has stopped. A part can be stopped more than once."""
        stopped = self.processes(part)
        self._stops.append((part, stopped))
        for process in stopped:
            process.suspend()
        self._fleet.wait_until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in stopped), 5.0)

    def resume(self, part: str) -> None:
        """Undo one stop of this part, if any; a process continues when all stops that include it are undone."""
        index = next((index for index, stop in enumerate(self._stops) if stop[0] == part), None)
        if index is None:
            return
        _, processes = self._stops.pop(index)
        still_stopped = {process for _, others in self._stops for process in others}
        for process in processes:
            if process not in still_stopped:
                with suppress(psutil.NoSuchProcess):  # has ended since
                    process.resume()

    def processes(self, part: str = "node") -> list[psutil.Process]:
        """Return the processes of a part; ranks in the order of their start."""
        frontend = psutil.Process(self.pid)
        engine: list[psutil.Process] = frontend.children()
        others: list[psutil.Process] = [child for process in engine for child in process.children()]
        others.sort(key=lambda process: (process.create_time(), process.pid))  # ranks start in their order
        match part:
            case "node":
                return [frontend, *engine, *others]
            case "frontend":
                return [frontend]
            case "engine":
                return engine
            case _:
                return [others[int(part.removeprefix("rank ")) - 1]]


#: The fleets of this process that are not closed.
open_fleets: WeakSet[Fleet] = WeakSet()


class Fleet:
    """The processes of a fleet. Leaving it as a context manager ends every process."""

    def __init__(self, node_flags: Sequence[str] = NODE_FLAGS, devices: Sequence[str] = ()) -> None:
        """``node_flags`` are the first flags of every node. Nodes get ``devices`` round-robin; none: as flags say."""
        open_fleets.add(self)
        self._node_flags = node_flags
        self._devices = devices
        self.prefill: list[NodeProcess] = []
        self.decode: list[NodeProcess] = []
        self.both: list[NodeProcess] = []  # nodes that prefill and decode
        self.http_nodes: list[NodeProcess] = []  # nodes with an OpenAI server beside them
        self.router: Process | None = None
        self._supervisor = Supervisor()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="fleet", daemon=True)
        self._listener.start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def nodes(self) -> list[NodeProcess]:
        return [*self.prefill, *self.decode, *self.both]

    @property
    def processes(self) -> list[Process]:
        return [*self.nodes, *([self.router] if self.router else [])]

    @property
    def prefilling(self) -> list[NodeProcess]:
        return [*self.prefill, *self.both]

    @property
    def decoding(self) -> list[NodeProcess]:
        return [*self.decode, *self.both]

    def of_role(self, role: str) -> list[NodeProcess]:
        return {"prefill": self.prefill, "decode": self.decode, "both": self.both}[role]

    @property
    def url(self) -> str:
        assert self.router is not None
        return f"http://{self.router.address}"

    def start_prefill(
        self, model_dir: Path, flags: Sequence[str] = (), environ: Mapping[str, str] = NO_VARIABLES
    ) -> NodeProcess:
        """Start a prefill node and wait until it listens; ``wait_ready`` waits until it is ready."""
        return self._start_node(self.prefill, "prefill", [str(model_dir), *self._node_flags, *flags], environ)

    def start_decode(
        self,
        model_dir: Path,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] = NO_VARIABLES,
        peers: bool = True,
    ) -> NodeProcess:
        """Start a decode node and wait until it listens; with ``peers``, all prefill nodes so far are its peers."""
        prefill_flags = [word for node in self.prefill for word in ("--prefill", node.address)] if peers else []
        return self._start_node(
            self.decode, "decode", [str(model_dir), *self._node_flags, *prefill_flags, *flags], environ
        )

    def start_both(
        self,
        model_dir: Path,
        listed: Path,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] = NO_VARIABLES,
    ) -> NodeProcess:
        """Start a node of both roles and wait until it listens; ``listed`` is a file that then names all such nodes."""
        listed.touch()
        source = ["--prefill", f"file://{listed}"]
        node = self._start_node(
            self.both, "both", [str(model_dir), *self._node_flags, *source, *flags], environ, "elastic"
        )
        new = listed.with_suffix(".new")
        new.write_text("".join(f"{node.address}\n" for node in self.both))
        os.replace(new, listed)
        return node

    def start_http_node(self, command: str, model_dir: Path, flags: Sequence[str]) -> NodeProcess:
        """Start a node with an OpenAI server beside it at ``address``, and wait until both are ready."""
        argv = [command, str(model_dir), *self._node_flags, "--http", "0", *flags]
        node = NodeProcess(self, self._spawn(f"http-{command}", "cli", argv), NO_VARIABLES)
        self.http_nodes.append(node)
        self.wait_until(lambda: self._is_ready(node.child), START_SECONDS)
        return node

    def start_router(
        self, model_dir: Path, flags: Sequence[str] = (), environ: Mapping[str, str] = NO_VARIABLES
    ) -> Process:
        """Start a router for all nodes started so far, with policy least-loaded unless flags say otherwise."""
        peers = [word for node in self.prefill for word in ("--prefill", node.address)]
        peers += [word for node in self.decode for word in ("--decode", node.address)]
        peers += [word for node in self.both for word in ("--node", node.address)]
        named = [str(model_dir), "--served-model-name", MODEL_NAME, "--port", "0"]
        argv = [*named, "--policy", "least-loaded", *peers, *flags]
        self.router = Process(self, self._spawn("router", "router", argv, environ), environ)
        return self.router

    def wait_connected(self, seconds: float = 30.0) -> None:
        """Wait until each node of both roles is connected to all others."""
        others = len(self.both) - 1
        self.wait_until(lambda: all(len(n.describe().connected_peers) == others for n in self.both), seconds)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until every process is ready. Fail with a child's last output if it ends instead."""
        self.wait_until(lambda: all(self._is_ready(process.child) for process in self.processes), seconds)

    def serves(self) -> bool:
        """Return whether the router knows a ready decode node; it learns this shortly after the node is ready."""
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{self.url}/health", timeout=patience(5.0)).close()
            return True
        return False

    def stacks(self) -> dict[str, str]:
        """Have ready nodes print the stacks of their threads. Return the last output of every process."""
        for node in self.nodes:
            if node.child.state == "ready" and node.child.running:
                node.child.last_lines = deque(node.child.last_lines, maxlen=1000)
                for process in node.processes():
                    process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return {process.name: process.output for process in self.processes}

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait ``seconds``, and longer on a busy machine."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() < start + patience(seconds), f"not within {patience(seconds):.1f} s"
            time.sleep(0.01)

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> list[int]:
        """Return the token ids of a greedy completion over HTTP."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        choice = self.post("/v1/completions", {**body, "return_token_ids": True, **fields})["choices"][0]
        assert isinstance(choice["token_ids"], list)
        return choice["token_ids"]

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
        """POST JSON to the router and return the JSON answer. Raises HttpError for an error status."""
        data = json.dumps({"model": MODEL_NAME, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=patience(timeout)) as response:
                return json.load(response)
        except urllib.error.HTTPError as exc:
            with exc:
                raise HttpError(exc.code, exc.read().decode()) from None

    def close(self) -> None:
        """End every process, all at the same time. Idempotent."""
        open_fleets.discard(self)
        for process in self.processes:
            if process.child.state == "ready":
                process.signal(signal.SIGINT)
        self._stopping.set()
        self._listener.join()
        self._supervisor.stop()

    def _start_node(
        self, nodes: list[NodeProcess], role: str, argv: Sequence[str], environ: Mapping[str, str], program: str = ""
    ) -> NodeProcess:
        module = f"{program or role}_node"
        flags = ["--peer-timeout", f"{patience(DEFAULT_TIMING.timeout):g}"]
        if self._devices:
            argv = [*argv, "--device", self._devices[len(self.nodes) % len(self._devices)]]
        child = self._spawn(f"{role}-{len(nodes)}", module, [argv[0], *flags, *argv[1:]], environ)
        node = NodeProcess(self, child, environ)
        nodes.append(node)
        self._wait_listening(node)
        return node

    def _spawn(self, name: str, module: str, argv: Sequence[str], environ: Mapping[str, str] = NO_VARIABLES) -> Child:
        with self._lock, mock.patch.dict(os.environ, environ):
            return self._supervisor.spawn(name, module, argv)

    def respawn(self, node: Process) -> None:
        """Start an ended process again at its address."""
        args = node.child.process.args
        assert isinstance(args, list)
        argv = args[args.index(node.child.module) + 1 : args.index("--status-fd")]
        port = node.address.rpartition(":")[2]
        node.child = self._spawn(node.child.name, node.child.module, [*argv, "--port", port], node.environ)

    def _wait_listening(self, node: NodeProcess) -> None:
        self.wait_until(lambda: self._is_alive(node.child) and bool(node.address), START_SECONDS)

    def _is_ready(self, child: Child) -> bool:
        return self._is_alive(child) and child.state == "ready"

    def _is_alive(self, child: Child) -> bool:
        if child.state in ("failed", "ended"):
            with self._lock:  # the listener thread appends lines
                last_output = "\n".join([child.last_error, *child.last_lines])
            raise AssertionError(f"{child.name} ended with status {child.process.poll()}: {last_output}")
        return True

    def _listen(self) -> None:
        """Read the output of the children; a full pipe would block them."""
        while not self._stopping.is_set():
            with self._lock:
                self._supervisor.wait(0.05)  # less if a child prints
            time.sleep(0.002)


class HttpError(Exception):
    """The router answered with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        """The ``error`` object of the body."""
        error = json.loads(self.body)["error"]
        assert isinstance(error, dict)
        return error


def add_tokenizer(model_dir: Path) -> Path:
    """Copy the embedded model's tokenizer into a random checkpoint; a router needs one even for token id prompts."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model_dir / name)
    return model_dir


def copy_without_weights(model_dir: Path) -> Path:
    """Copy the embedded model into a directory for simulated nodes, which need no weights."""
    for name in ("config.json", "generation_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model_dir / name)
    return add_tokenizer(model_dir)


def start_fleet(
    model_dir: Path,
    prefill: int = 1,
    decode: int = 1,
    router: bool = True,
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
) -> Fleet:
    """Start nodes (and a router) for a checkpoint and wait until all are ready."""
    fleet = Fleet()
    try:
        for _ in range(prefill):
            fleet.start_prefill(model_dir, prefill_flags)
        for _ in range(decode):
            fleet.start_decode(model_dir, decode_flags)
        if router:
            fleet.start_router(model_dir, router_flags)
        fleet.wait_ready()
    except BaseException:
        fleet.close()
        raise
    return fleet


def start_elastic(
    model_dir: Path, listed: Path, nodes: int, flags: Sequence[str] = (), router_flags: Sequence[str] = ()
) -> Fleet:
    """Start connected nodes of both roles and a router; ``listed`` is a file for their addresses."""
    fleet = Fleet()
    try:
        for _ in range(nodes):
            fleet.start_both(model_dir, listed, flags)
        fleet.start_router(model_dir, router_flags)
        fleet.wait_ready()
        fleet.wait_connected()
    except BaseException:
        fleet.close()
        raise
    return fleet
