"""``pdserve up``: prefill nodes, decode nodes and a router on one machine, as child processes."""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from cli.up.flags import check_flags, make_parser, router_options, set_secrets, settle_model
from cli.up.local_fleet import FleetPlan, LocalFleet
from cli.up.restarts import MAX_FAILURES
from cli.up.startup_display import Display, serving_display, starting_display
from cli.up.supervisor import Changed, Child, Died, Printed, Supervisor
from cli.up.welcome import print_welcome
from pdserve.checkpoint.files import read_text
from pdserve.errors import CapacityError, ConfigError, NodeError, PdserveError
from pdserve.host.bytecode import warn_of_missing_bytecode
from pdserve.host.process import EXIT_INTERRUPTED, EXIT_REFUSED, describe_exit, run_command
from pdserve.logs import setup_logging
from pdserve.rpc.address import probe_port
from pdserve.rpc.tls import load_chain
from router.gate.keys import KeyFile
from router.options import RouterOptions
from router.text.chat.template import MAX_SOURCE, ChatTemplate
from router.text.chat.template_renderer import check_template

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # longest delay until a signal is noticed
DRAIN_RESERVE = 15.0  # seconds beyond --drain-timeout for leases and process exits


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. A failed start prints one line on stderr and returns a non-zero status."""
    return run_command(lambda: up(make_parser().parse_args(argv)))


def up(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises NodeError or ConfigError if a child cannot start, or has died too often."""
    setup_logging("up", args.log_format, args.log_level)
    if args.engine != "simulated":
        warn_of_missing_bytecode()
    settle_model(args)
    check_flags(args)
    router = router_options(args)
    check_router(router)
    set_secrets(args)
    if not sys.stderr.isatty():  # on a terminal a table shows the start
        _log.info("starting %s", args.model)
    plan = FleetPlan.of(args)
    with StopSignals() as stop, Supervisor() as children:
        fleet = LocalFleet(children, plan, args)
        display = starting_display(children.children)
        try:
            watch(children, display, stop, until=fleet.advance, died=refuse)
        finally:
            display.close()
        if stop.received:
            _log.info("stopping")
            return EXIT_INTERRUPTED
        print_welcome(fleet.url, plan.config, fleet.nodes, router)
        display = serving_display()
        watch(children, display, stop, until=lambda: restart_due(fleet), died=lambda child: restart_later(fleet, child))
        if not stop.immediate:
            _log.info("draining; a second signal stops at once")
            deadline = time.monotonic() + args.drain_timeout + DRAIN_RESERVE
            children.drain(lambda: stop.immediate or time.monotonic() > deadline, display.printed)
        _log.info("stopping")
    return 0


def watch(
    children: Supervisor, display: Display, stop: StopSignals, until: Callable[[], bool], died: Callable[[Child], None]
) -> None:
    """Display the children's events until ``until()`` or a stop signal. Call ``died`` for a child that dies before.

    A stop signal to the process group also reaches a child that was forked and does not lead its own session yet.
    """
    while not (stop.received or until()):
        for event in children.wait(POLL_SECONDS):
            match event:
                case Printed(child, text):
                    display.printed(child, text)
                case Changed(child):
                    display.changed(child)
                case Died(child) if not stop.received:
                    died(child)
        display.tick()


def refuse(child: Child) -> None:
    """Raise the error of a child that died before all were ready."""
    raise death_of(child)


def restart_due(fleet: LocalFleet) -> bool:
    """Start processes whose restart is due. Return False: the fleet serves until a signal."""
    fleet.advance()
    return False


def restart_later(fleet: LocalFleet, child: Child) -> None:
    """Have a process that died start again. Raises its error if it has failed too often.

    A process that ends with status 0 was asked to: it has drained, as in a planned restart.
    """
    error = death_of(child)
    delay = fleet.restart(child, time.monotonic())
    if delay and child.process.returncode == 0 and not child.failed_with:
        _log.info("%s has ended as it was asked to; it starts again in %g s, the others serve on", child.name, delay)
        return
    if not delay:
        raise NodeError(f"{error}. It has failed {MAX_FAILURES} times in a row") from error
    _log.error("%s. It starts again in %g s; the others serve on", error, delay)


def death_of(child: Child) -> PdserveError:
    """Return an error with the exit status, the last message of the child and a remedy."""
    status = child.failed_with or child.process.returncode
    if status == EXIT_REFUSED:
        return ConfigError(f"{child.name}: {child.last_error}")
    return NodeError(f"{child.name} {describe_exit(status)}: {child.last_error}. Hint: {_hint(child, status)}")


def _hint(child: Child, status: int) -> str:
    if status == -signal.SIGKILL or "was killed by SIGKILL" in child.last_error:  # child, engine or rank was killed
        return "unless a user killed it, the system ran out of memory: set a smaller --kv-cache-memory"
    if child.error or status == 0:
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


def check_port(host: str, port: int, flag: str) -> None:
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


def check_router(options: RouterOptions) -> None:
    """Raise an error unless the router's ports are free and its files valid."""
    check_port(options.host, options.port, "--port")
    if options.metrics_port is not None:
        check_port(options.metrics_host, options.metrics_port, "--metrics-port")
    if options.api_keys is not None:
        KeyFile(options.api_keys)
    if options.chat_template is not None:
        check_template(ChatTemplate(read_text(Path(options.chat_template), MAX_SOURCE), {}))
    if options.tls_cert is not None and options.tls_key is not None:
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path(options.tls_cert), Path(options.tls_key))
