"""The ``pdserve`` command. ``--help`` answers at once: it imports no command."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

from cli.commands import COMMANDS, module_of
from pdserve import __version__
from pdserve.errors import ConfigError
from pdserve.flags.parser import CommandParser
from pdserve.flags.sources import VARIABLE_PREFIX
from pdserve.host.process import run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        if argv and not argv[0].startswith("-"):
            nearest = difflib.get_close_matches(argv[0], COMMANDS, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(COMMANDS)}"
            raise ConfigError(f"{argv[0]!r} is no command of pdserve; {remedy}")
        parser, _ = make_parser()
        parser.parse_args(argv)
        parser.print_help()
        return 2
    name, *rest = argv
    if any(variable.startswith(VARIABLE_PREFIX) for variable in os.environ):
        from cli.variables import warn_of_unread_variables

        warn_of_unread_variables(name)
    return int(module_of(name).main(rest))


def make_parser() -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser of ``pdserve``, and the parsers of its commands by name, which have no flags yet."""
    parser = CommandParser(
        prog="pdserve",
        description="Serve large language models with prefill and decode on separate machines.",
        epilog="pdserve COMMAND --help lists the flags of a command. Models: a checkpoint directory or a hub id.",
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser, commands.choices
