"""``pdserve decode --http PORT`` and ``pdserve serve --http PORT``: a node with an OpenAI server beside it.

    gateway ──HTTP──► router of this node ──gRPC──► this node ──► its prefill nodes
                      └──── two child processes ────┘

The router is the one of ``pdserve router``: it knows this node, which alone decodes for it (``--home-node``), and the
nodes that this node reads KV from. If the node ends, so does the command; a router that ends starts again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cli.up.command import DRAIN_RESERVE, POLL_SECONDS, StopSignals, check_port, death_of
from cli.up.flags import actions_of, set_secrets, words_of_action
from cli.up.restarts import Restarts
from cli.up.supervisor import Child, Died, Printed, Supervisor
from node.frontend_flags import FrontendOptions
from pdserve.config.multi_host import add_host_flags, local_ranks_from
from pdserve.config.node_options import model_name, node_options_from, node_words
from pdserve.errors import ConfigError
from pdserve.flags.declaration import options_from, words_of
from pdserve.flags.parser import CommandParser
from pdserve.flags.value_types import port_number
from pdserve.host.process import StatusWriter, run_command, watch_lifeline
from pdserve.logs import setup_logging
from router.options import add_router_flags

#: Flags of the router that follow from the node's.
_SETTLED = {"port", "metrics_port", "metrics_host", "home_node", "migrations"}


class NodeProgram(NamedTuple):
    """A program that may have an OpenAI server beside it."""

    name: str  # command name
    module: str
    listed_as: str  # flag of routers for it
    peers_as: str  # flag of routers for the nodes that it reads from
    make_parser: Callable[[], CommandParser]
    main: Callable[[Sequence[str] | None], int]
    add_role_flags: Callable[[argparse.ArgumentParser], None]


def make_parser(program: NodeProgram) -> CommandParser:
    """Return the parser of the program, with the flags of the router beside it."""
    parser = program.make_parser()
    group = parser.add_argument_group("OpenAI server beside the node", "All but --http need --http.")
    group.add_argument("--http", type=port_number, metavar="PORT", help="serve the OpenAI protocol here, for gateways")
    for action in _router_actions(parser):
        group._add_action(action)
    return parser


def main(program: NodeProgram, argv: Sequence[str] | None) -> int:
    """Run the node, with a router beside it if ``--http`` is given, until a signal. Return the exit status."""
    args = make_parser(program).parse_args(argv)
    if args.http is None:
        flags = {flag for action in _router_actions(program.make_parser()) for flag in action.option_strings}
        given = [word for word in argv or () if word.partition("=")[0] in flags]
        return run_command(lambda: _refuse(given[0])) if given else program.main(argv)
    return run_command(lambda: _run(program, args))


def _refuse(flag: str) -> int:
    raise ConfigError(f"{flag} is a flag of the OpenAI server beside the node; add --http PORT, or use a router")


def _run(program: NodeProgram, args: argparse.Namespace) -> int:
    options = node_options_from(args)
    if not local_ranks_from(args, options.num_ranks).has_leader:
        return program.main(_node_words(program, args))
    setup_logging(program.name, args.log_format, args.log_level)
    status = StatusWriter(args.status_fd)
    watch_lifeline(args.lifeline_fd)
    try:
        check_port(args.host, args.http, "--http")
        set_secrets(args)
        _Pair(program, args, status).serve()
    except Exception as exc:
        status.failed(exc)
        raise
    return 0


class _Pair:
    """The node and the router beside it."""

    def __init__(self, program: NodeProgram, args: argparse.Namespace, status: StatusWriter) -> None:
        self._program = program
        self._args = args
        self._status = status
        self._restarts = Restarts()
        self._router: Child | None = None
        self._told = ""  # state last reported to the parent: "listening" or "ready"

    def serve(self) -> None:
        """Raises ConfigError or NodeError if the node ends, or if the router fails to start or has ended too often."""
        args = self._args
        with StopSignals() as stop, Supervisor() as children:
            node = children.spawn(self._program.name, self._program.module, _node_words(self._program, args))
            while not stop.received:
                for event in children.wait(POLL_SECONDS):
                    self._handle(event, node)
                self._advance(node, children)
            if not stop.immediate:
                deadline = time.monotonic() + args.drain_grace + args.drain_timeout + DRAIN_RESERVE
                children.drain(lambda: stop.immediate or time.monotonic() > deadline, _print)

    def _handle(self, event: object, node: Child) -> None:
        match event:
            case Printed(child, text):
                follows = node.state == "failed" and child is not node  # the router has lost its node
                if not follows and not child.has_reported(text):
                    _print(child, text)
            case Died(child):
                served = time.monotonic() - child.ready_at if child.ready_at else 0.0
                failed_start = self._told != "ready"  # a wrong flag or file would fail again
                if child is node or failed_start or not self._restarts.died(time.monotonic(), served):
                    raise death_of(child)

    def _advance(self, node: Child, children: Supervisor) -> None:
        """Start the router once the node's address is known, or again, and tell the parent."""
        router = self._router
        if router is None and node.address:
            self._router = children.spawn("router", "router", _router_words(self._program, self._args, node.address))
        elif router is not None and router.state == "ended" and time.monotonic() >= self._restarts.due:
            self._router = children.replace(router, _router_words(self._program, self._args, node.address))
        elif router is not None and router.address and not self._told:
            self._told = "listening"
            self._status.listening(router.address)
        elif router is not None and self._told == "listening" and node.state == router.state == "ready":
            self._told = "ready"
            self._status.ready(node.kv_tokens)


def _print(child: Child, text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _router_actions(parser: CommandParser) -> list[argparse.Action]:
    """Return the flags of the router that the node's ``parser`` lacks."""
    actions = [action for action in actions_of(add_router_flags) if action.dest not in _SETTLED]
    return [action for action in actions if action.option_strings[0] not in parser._option_string_actions]


def _words(action: argparse.Action, args: argparse.Namespace) -> list[str]:
    return words_of_action(action, getattr(args, action.dest))


def _node_words(program: NodeProgram, args: argparse.Namespace) -> list[str]:
    """Return the command line of the node: the flags that differ from their defaults."""
    role = CommandParser(add_help=False)
    program.add_role_flags(role)
    add_host_flags(role)
    words = [word for action in role._actions for word in _words(action, args)]
    frontend = words_of(options_from(FrontendOptions, args, status_fd=None, lifeline_fd=None))
    return [*node_words(node_options_from(args)), *frontend, *words]


def _router_words(program: NodeProgram, args: argparse.Namespace, address: str) -> list[str]:
    """Return the command line of the router beside the node at ``address``."""
    actions = [action for action in actions_of(add_router_flags) if action.dest not in {*_SETTLED, "api_key"}]
    words = [word for action in actions for word in _words(action, args)]
    peers = [word for source in args.prefill for word in (program.peers_as, source)]
    name = args.served_model_name or model_name(args.model)
    nodes = [program.listed_as, address, *peers, "--home-node", args.node_id or address, "--migrations", "0"]
    return [args.model, "--served-model-name", name, "--port", str(args.http), *nodes, *words]
