"""The program of every node: parse flags, start the engine process, then run the node or this host's ranks of one.

``NodeProgram`` is given the parts that only P, only D or nodes of both roles have: their flags and their role.

    frontend   flags │ gRPC, configuration, port … │ listens ──────────► waits ──► serves
                     └► engine process: its imports, torch ─ Configure ─► loads ─┘

Imports take seconds. So the programs import the modules for flags, and the rest after the start of the engine process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from node.engine_client.launched_engine import launched_engine
from node.frontend_flags import FrontendOptions
from pdserve.config.multi_host import LocalRanks, add_host_flags, local_ranks_from
from pdserve.config.node_options import NodeOptions, add_node_flags, node_options_from
from pdserve.flags.declaration import add_flags, options_from
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.host.bytecode import warn_of_missing_bytecode
from pdserve.host.process import EXIT_FAILED, StatusWriter, exit_status, run_command, watch_lifeline
from pdserve.logs import setup_logging

if TYPE_CHECKING:
    from node.context import Role  # imports gRPC


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


@dataclass(frozen=True)
class NodeProgram:
    """The program of one role."""

    role: str  # name in logs
    prog: str  # name in help
    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]  # flags that only this role has
    load: Callable[[], NodeParts]  # imports gRPC and more; called once the engine process has started

    def make_parser(self) -> CommandParser:
        parser = role_parser(self.prog, self.summary)
        self.add_flags(parser)
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run a node, or this host's ranks of it, until it is stopped; return the exit status."""
        return run_command(lambda: self._run(argv))

    def _run(self, argv: Sequence[str] | None) -> int:
        args = self.make_parser().parse_args(argv)
        frontend = options_from(FrontendOptions, args)
        options = node_options_from(args)
        local = local_ranks_from(args, options.num_ranks)
        setup_logging(self.role, frontend.log_format, frontend.log_level)
        watch_lifeline(frontend.lifeline_fd)
        status = StatusWriter(frontend.status_fd)
        if not options.simulated and not status.has_reader:  # pdserve up says it for all of its nodes
            warn_of_missing_bytecode()
        try:
            if not local.has_leader:
                return self.load().run_ranks(options, local, status)
            with launched_engine(0 if options.simulated else len(local.ranks)) as engine:
                role = self.load().make_role(args)
                import uvloop

                from node.serving import serve  # imports gRPC

                uvloop.run(serve(role, options, local, frontend, status, engine))
        except Exception as exc:
            status.failed(exc)
            if exit_status(exc) == EXIT_FAILED and not options.simulated:
                from pdserve.config.kernels.triton_hosts import forget_success

                forget_success()
            raise
        return 0
