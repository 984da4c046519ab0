"""bench/goodput.py on fleets that this script starts one after the other, for example on two GPUs of a machine.

    python bench/make_checkpoint.py /tmp/l --shape llama-8b --config-only
    python bench/goodput_fleets.py /tmp/l --devices cuda:0 cuda:1 --rates 8,16,24 \\
        --node-flags "--load-format dummy --max-model-len 16384" --out "$OUT"

A fleet is ``1p1d`` (one prefill and one decode node), ``2d`` (decode nodes that prefill, too), another pair of numbers,
or ``up`` with flags of ``pdserve up``: ``"up --elastic"``. Nodes get ``--devices`` in this order; ``up``
assigns its own. ``--node-flags`` go to every node and to ``up``. Each ``--system`` is a server that already runs; it is
measured first. Other flags are those of bench/goodput.py.

``--out`` receives a log per process, goodput.json after each measurement and goodput.md. A fleet that does not start is
reported with its last lines, and the others are measured. At ``--time-limit`` the table has what is measured so far.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import uvloop
from goodput import Result, add_flags, load_text, measure, parse_objectives, table
from loads import make_loads
from systems import System

from cli.bench.http_load import ServerError
from pdserve.errors import ConfigError, shown
from pdserve.host.process import run_command

LOCAL = "127.0.0.1"
STOP_SECONDS = 10.0  # from the stop signal to a process until its group is killed
NODES = re.compile(r"(?:(\d+)p)?(\d+)d")  # a fleet: numbers of prefill and decode nodes
READY_NODES = re.compile(r"^pdserve_nodes_ready{.*} (\S+)$", re.MULTILINE)
LAST_LINES = 15  # lines at the end of a log, shown if its process fails


class FleetError(Exception):
    """A fleet did not become ready."""


class Processes:
    """The processes of a fleet, each with a log. Leaving it as a context manager stops them, last started first."""

    def __init__(self, fleet: str, out: Path) -> None:
        self._prefix = str(out / re.sub(r"\W+", "-", fleet))
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in reversed(self._running):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, name: str, module: str, *argv: str) -> Path:
        """Start ``python -m module argv…``; return the path of its log."""
        log = Path(f"{self._prefix}-{name}.log")
        command = [sys.executable, "-P", "-m", module, *argv]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._running.append((process, log))
        return log

    def check(self) -> None:
        """Raise FleetError if a process has ended."""
        for process, log in self._running:
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                raise FleetError("\n".join([f"{log.stem} ended with status {process.returncode}:", *lines]))


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server((LOCAL, 0)) for _ in range(count)]
    ports = [str(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def start_nodes(processes: Processes, args: argparse.Namespace, prefill: int, decode: int, port: str) -> None:
    """Start prefill nodes, decode nodes and a router on ``port``; devices wrap around if there are too few."""
    peers: list[str] = []
    flags = shlex.split(args.node_flags)
    roles = ["prefill"] * prefill + ["decode"] * decode
    for number, (role, node_port) in enumerate(zip(roles, free_ports(len(roles)), strict=True)):
        device = args.devices[number % len(args.devices)]
        node = [args.model_dir, "--port", node_port, "--device", device, *flags]
        processes.start(f"{role}-{number}", f"{role}_node", *node, *(peers[: 2 * prefill] if role == "decode" else []))
        peers += [f"--{role}", f"{LOCAL}:{node_port}"]
    processes.start("router", "router", args.model_dir, "--port", port, *peers)


def nodes_ready(url: str) -> int:
    """Return how many nodes the router at ``url`` knows to be ready; 0 until it listens."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=5.0) as answer:
        return sum(int(float(value)) for value in READY_NODES.findall(answer.read().decode()))
    return 0


def start(fleet: str, processes: Processes, args: argparse.Namespace, port: str) -> Callable[[], bool]:
    """Start the processes of a fleet; return whether all are ready, as a function."""
    if match := NODES.fullmatch(fleet):
        prefill = int(match[1] or 0)
        decode = int(match[2])
        start_nodes(processes, args, prefill, decode, port)
        return lambda: nodes_ready(f"http://{LOCAL}:{port}") == prefill + decode
    flags = [*shlex.split(args.node_flags), *shlex.split(fleet)[1:]]
    log = processes.start("up", "cli", "up", args.model_dir, "--port", port, *flags)
    return lambda: b" is served at " in log.read_bytes()


@contextmanager
def running(fleet: str, args: argparse.Namespace) -> Iterator[System]:
    """Start a fleet and wait until every node is ready. Raises FleetError."""
    (port,) = free_ports(1)
    with Processes(fleet, args.out) as processes:
        is_ready = start(fleet, processes, args, port)
        end = time.monotonic() + args.start_timeout
        while not is_ready():
            processes.check()
            if time.monotonic() > end:
                raise FleetError(f"not ready after {args.start_timeout:g} s; see its logs in {args.out}")
            time.sleep(0.2)
        yield System.of(f"{fleet.replace('=', ' ')}=http://{LOCAL}:{port}")


def measure_all(args: argparse.Namespace, results: list[Result]) -> int:
    """Measure the running systems, then each fleet; append to ``results`` and return how many failed.

    Raises ConfigError before the first measurement.
    """
    for fleet in args.fleets:
        if not NODES.fullmatch(fleet) and fleet.partition(" ")[0] != "up":
            raise ConfigError(f"--fleets {shown(fleet)} is invalid; use 1p1d, 2d or 'up FLAGS'")
    given = {text: System.of(text) for text in args.system}
    loads = make_loads(args)
    end = time.monotonic() + args.time_limit
    failed = 0
    for name in [*args.system, *args.fleets]:
        try:
            with nullcontext(given[name]) if name in given else running(name, args) as system:
                measurement = measure(system, loads, args, results)
                uvloop.run(asyncio.wait_for(measurement, max(0.0, end - time.monotonic())))
        except (FleetError, ServerError) as exc:
            print(f"{name}: error: {exc}", file=sys.stderr, flush=True)
            failed += 1
        except TimeoutError:
            print(f"{name}: --time-limit {args.time_limit:g} has passed; the table is not complete", file=sys.stderr)
            return failed + 1
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", metavar="MODEL", help="checkpoint of the fleets' nodes")
    parser.add_argument(
        "--fleets", nargs="*", default=["1p1d", "2d", "up --elastic"], metavar="FLEET", help="1p1d, 2d, 'up FLAGS'"
    )
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"], metavar="DEVICE", help="of the nodes")
    parser.add_argument("--node-flags", default="", metavar="FLAGS", help="flags of every node and of `pdserve up`")
    parser.add_argument("--out", type=Path, default=Path("goodput"), metavar="DIR", help="of logs and figures")
    parser.add_argument("--start-timeout", type=float, default=180.0, metavar="S", help="until a fleet is ready")
    parser.add_argument("--time-limit", type=float, default=570.0, metavar="S", help="of the whole run")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.goodput = parse_objectives(args.goodput)
    args.out.mkdir(parents=True, exist_ok=True)
    args.json = args.json or args.out / "goodput.json"
    results: list[Result] = []
    failed = measure_all(args, results)
    report = f"{load_text(args)}\n\n{table(results, [*dict.fromkeys(result.system for result in results)])}"
    (args.out / "goodput.md").write_text(report + "\n")
    print(report)
    return 1 if failed or any(result.errors for result in results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the processes
    sys.exit(run_command(main))
