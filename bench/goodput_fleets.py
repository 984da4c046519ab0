"""bench/goodput.py on fleets that this script starts one after the other, for example on two GPUs of a machine.

    python bench/make_checkpoint.py /tmp/l --shape llama-8b --config-only
    python bench/goodput_fleets.py /tmp/l --devices cuda:0 cuda:1 --rates 8,16,24 \\
        --node-flags "--load-format dummy --max-model-len 16384" --out "$OUT"

A fleet is ``1p1d`` (one prefill and one decode node), ``2d`` (decode nodes that prefill, too), another pair of numbers,
or ``up`` with flags of ``pdserve up``: ``"up --elastic"``. Nodes get ``--devices`` in this order; ``up``
assigns its own. ``--node-flags`` go to every node and to ``up``. ``"vllm FLAGS"`` and ``"lmdeploy FLAGS"`` start one
server of these engines; ``--vllm`` and ``--lmdeploy`` are the commands, with any environment:
``--vllm "env HF_HUB_OFFLINE=1 /opt/vllm/bin/vllm serve"``. Each ``--system`` is a server that already runs; it is
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
from goodput import Report, add_flags, load_text, measure, parse_objectives, table, with_warmup
from loads import make_loads
from systems import LMDEPLOY, OPENAI, System

from cli.bench.http_load import Endpoint, ServerError
from pdserve.errors import ConfigError, shown
from pdserve.host.process import run_command

LOCAL = "127.0.0.1"
STOP_SECONDS = 10.0  # from the stop signal to a process until its group is killed
GROUP_SECONDS = 5.0  # from the kill of a group until all its processes have ended
NODES = re.compile(r"(?:(\d+)p)?(\d+)d")  # a fleet: numbers of prefill and decode nodes
FLEETS = "1p1d, 2d, 'up FLAGS', 'vllm FLAGS' or 'lmdeploy FLAGS'"
READY_NODES = re.compile(r"^pdserve_nodes_ready{.*} (\S+)$", re.MULTILINE)
PEERS = {"vllm": OPENAI, "lmdeploy": LMDEPLOY}  # other engines, with the kinds of their systems
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
            with suppress(ProcessLookupError):  # the next fleet needs the GPU memory of all
                for _ in range(round(GROUP_SECONDS / 0.1)):
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)

    def start_module(self, name: str, module: str, *argv: str) -> Path:
        """Start ``python -m module argv…``; return the path of its log."""
        return self.start(name, [sys.executable, "-P", "-m", module, *argv])

    def start(self, name: str, command: Sequence[str]) -> Path:
        """Start a command; return the path of its log. Raises FleetError."""
        log = Path(f"{self._prefix}-{name}.log")
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as exc:
                raise FleetError(f"cannot start {shown(command[0])}: {exc.strerror}") from exc
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
        if role == "decode":
            node += peers[: 2 * prefill]
        processes.start_module(f"{role}-{number}", f"{role}_node", *node)
        peers += [f"--{role}", f"{LOCAL}:{node_port}"]
    processes.start_module("router", "router", args.model_dir, "--port", port, *peers)


def nodes_ready(url: str) -> int:
    """Return how many nodes the router at ``url`` knows to be ready; 0 until it listens."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=5.0) as answer:
        return sum(int(float(value)) for value in READY_NODES.findall(answer.read().decode()))
    return 0


def lists_models(url: str) -> bool:
    """Return whether the server at ``url`` lists its models; other engines do once they are ready."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5.0):
        return True
    return False


def start(fleet: str, processes: Processes, args: argparse.Namespace, port: str) -> Callable[[], bool]:
    """Start the processes of a fleet; return whether all are ready, as a function."""
    if match := NODES.fullmatch(fleet):
        prefill = int(match[1] or 0)
        decode = int(match[2])
        start_nodes(processes, args, prefill, decode, port)
        return lambda: nodes_ready(f"http://{LOCAL}:{port}") == prefill + decode
    program, *flags = shlex.split(fleet)
    if program in PEERS:
        command = shlex.split(getattr(args, program))
        listens = ["--host", LOCAL, "--port"] if program == "vllm" else ["--server-name", LOCAL, "--server-port"]
        processes.start(program, [*command, args.model_dir, *listens, port, *flags])
        return lambda: lists_models(f"http://{LOCAL}:{port}")
    flags = [*shlex.split(args.node_flags), *flags]
    log = processes.start_module("up", "cli", "up", args.model_dir, "--port", port, *flags)
    return lambda: b" is served at " in log.read_bytes()


@contextmanager
def running(fleet: str, args: argparse.Namespace, name: str) -> Iterator[System]:
    """Start a fleet and wait until every node is ready. Raises FleetError."""
    (port,) = free_ports(1)
    with Processes(name, args.out) as processes:
        is_ready = start(fleet, processes, args, port)
        end = time.monotonic() + args.start_timeout
        while not is_ready():
            processes.check()
            if time.monotonic() > end:
                raise FleetError(f"not ready after {args.start_timeout:g} s; see its logs in {args.out}")
            time.sleep(0.2)
        kind = PEERS.get(fleet.partition(" ")[0], OPENAI)
        yield System(name, (Endpoint.of(f"http://{LOCAL}:{port}"),), kind)


def check_fleet(flag: str, fleet: str) -> None:
    """Raise ConfigError for a fleet that ``start`` does not know."""
    if not NODES.fullmatch(fleet) and fleet.partition(" ")[0] not in ("up", *PEERS):
        raise ConfigError(f"{flag} {shown(fleet)} is invalid; use {FLEETS}")


def measure_all(args: argparse.Namespace, report: Report) -> int:
    """Measure the running systems, then each fleet; return how many failed.

    Raises ConfigError before the first measurement.
    """
    for fleet in args.fleets:
        check_fleet("--fleets", fleet)
    given = {text: System.of(text) for text in args.system}
    loads = with_warmup(make_loads(args), args)
    end = time.monotonic() + args.time_limit
    failed = 0
    for name in [*args.system, *args.fleets]:
        try:
            with nullcontext(given[name]) if name in given else running(name, args, name) as system:
                measurement = measure(system, loads, args, report.add)
                uvloop.run(asyncio.wait_for(measurement, max(0.0, end - time.monotonic())))
        except (FleetError, ServerError) as exc:
            print(f"{name}: error: {exc}", file=sys.stderr, flush=True)
            failed += 1
        except TimeoutError:
            print(f"{name}: --time-limit {args.time_limit:g} has passed; the table is not complete", file=sys.stderr)
            return failed + 1
    return failed


def add_start_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``running``, without ``--devices``."""
    parser.add_argument("--node-flags", default="", metavar="FLAGS", help="flags of every node and of `pdserve up`")
    parser.add_argument("--vllm", default="vllm serve", metavar="COMMAND", help="starts vLLM (default: %(default)s)")
    lmdeploy = "starts LMDeploy (default: %(default)s)"
    parser.add_argument("--lmdeploy", default="lmdeploy serve api_server", metavar="COMMAND", help=lmdeploy)
    parser.add_argument("--out", type=Path, default=Path("goodput"), metavar="DIR", help="of logs and figures")
    parser.add_argument("--start-timeout", type=float, default=180.0, metavar="S", help="until a fleet is ready")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", metavar="MODEL", help="checkpoint of the fleets' nodes")
    parser.add_argument("--fleets", nargs="*", default=["1p1d", "2d", "up --elastic"], metavar="FLEET", help=FLEETS)
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"], metavar="DEVICE", help="of the nodes")
    add_start_flags(parser)
    parser.add_argument("--time-limit", type=float, default=570.0, metavar="S", help="of the whole run")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.goodput = parse_objectives(args.goodput)
    args.out.mkdir(parents=True, exist_ok=True)
    args.json = args.json or args.out / "goodput.json"
    report = Report(args)
    failed = measure_all(args, report)
    names = dict.fromkeys(result.system for result in report.results)
    text = f"{load_text(args)}\n\n{table(report.results, [*names])}"
    (args.out / "goodput.md").write_text(text + "\n")
    print(text)
    return 1 if failed or any(result.errors for result in report.results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the processes
    sys.exit(run_command(main))
