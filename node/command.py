"""The command line of a node: parse flags, start the engine process, then run the node or this host's ranks of one.

    frontend   flags │ gRPC, configuration, port … │ listens ──────────► waits ──► serves
                     └► engine process: its imports, torch ─ Configure ─► loads ─┘

Imports take seconds. So this module imports the modules for flags, and the rest after the start of the engine process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from node.frontend_flags import FrontendOptions
from node.launched_engine import launched_engine
from pdserve.bytecode import warn_of_missing_bytecode
from pdserve.config.multi_host import LocalRanks, add_host_flags, local_ranks_from
from pdserve.config.node_options import NodeOptions, add_node_flags, node_options_from
from pdserve.flags.declaration import add_flags, options_from
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.logs import setup_logging
from pdserve.process import EXIT_FAILED, StatusWriter, exit_status, run_command, watch_lifeline

if TYPE_CHECKING:
    from node.context import Role


class NodeParts(NamedTuple):
    """The functions that run a node, or the ranks of a host without a frontend."""

    make_role: Callable[[argparse.Namespace], Role]
    run_ranks: Callable[[NodeOptions, LocalRanks, StatusWriter], int]


def role_parser(prog: str, description: str) -> CommandParser:
    parser = command_parser(prog, description)
    add_node_flags(parser)
    add_flags(parser, FrontendOptions)
    add_host_flags(parser)
    return parser


def run_role(
    name: str, parser: argparse.ArgumentParser, argv: Sequence[str] | None, load: Callable[[], NodeParts]
) -> int:
    """Run a node of role ``name``, or this host's ranks of it, until it is stopped; return the exit status.

    ``load`` imports the parts, once the engine process has been started.
    """

    def command() -> int:
        args = parser.parse_args(argv)
        frontend, options = options_from(FrontendOptions, args), node_options_from(args)
        local = local_ranks_from(args, options.num_ranks)
        setup_logging(name, frontend.log_format, frontend.log_level)
        watch_lifeline(frontend.lifeline_fd)
        status = StatusWriter(frontend.status_fd)
        if not options.simulated and not status.has_reader:  # pdserve up says it for all of its nodes
            warn_of_missing_bytecode()
        try:
            if not local.has_leader:
                return load().run_ranks(options, local, status)
            with launched_engine(0 if options.simulated else len(local.ranks)) as engine:
                make_role = load().make_role
                import uvloop

                from node.serving import serve  # imports gRPC

                uvloop.run(serve(make_role(args), options, local, frontend, status, engine))
        except Exception as exc:
            status.failed(exc)
            if exit_status(exc) == EXIT_FAILED and not options.simulated:
                from pdserve.config.triton_hosts import forget_success

                forget_success()
            raise
        return 0

    return run_command(command)
