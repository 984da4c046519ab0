"""``pdserve up``: prefill nodes, decode nodes and a router on one machine, as child processes."""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from types import FrameType

from pdserve.errors import CapacityError, ConfigError, NodeError, PdserveError
from pdserve.launcher.local_fleet import FleetPlan, LocalFleet
from pdserve.launcher.startup_display import StartupDisplay, make_display
from pdserve.launcher.supervisor import Changed, Child, Died, Printed, Supervisor
from pdserve.launcher.welcome import welcome
from pdserve.logs import choose_format, set_process_fields
from pdserve.process import EXIT_INTERRUPTED, EXIT_REFUSED, describe_exit, say
from pdserve.rpc.address import probe_port

POLL_SECONDS = 0.1  # longest delay until a signal is noticed
DRAIN_RESERVE = 15.0  # seconds beyond --drain-timeout for leases and process exits


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
        print(welcome(fleet.url, plan.config, fleet.nodes, True, args.api_keys is not None), flush=True)
        watch(children, make_display((), live=False), until=lambda: stop.received)
        if not stop.immediate:
            say("draining; a second signal stops at once", level="INFO")
            deadline = time.monotonic() + args.drain_timeout + DRAIN_RESERVE
            children.drain(lambda: stop.immediate or time.monotonic() > deadline)
        say("stopping", level="INFO")
    return 0


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
