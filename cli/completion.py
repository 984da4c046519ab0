"""``pdserve completion SHELL``: print a completion script, made by shtab from the parsers of all commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shtab

from cli.commands import COMMANDS, parser_of
from cli.main import make_parser as make_pdserve_parser
from pdserve.flags.parser import CommandParser
from pdserve.host.process import run_command

SHELLS = ("bash", "zsh", "fish")
_COMPLETE = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY}  # by metavar


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _print_script(make_parser().parse_args(argv).shell))


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="pdserve completion",
        description='Print a completion script. bash: eval "$(pdserve completion bash)" in ~/.bashrc; zsh: write it to '
        "_pdserve in a folder of $fpath; fish: to ~/.config/fish/completions/pdserve.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


def _print_script(shell: str) -> int:
    parser, commands = make_pdserve_parser()
    for name in COMMANDS:
        commands[name] = parser_of(name)
        actions: list[Any] = commands[name]._actions  # shtab reads an attribute that argparse does not declare
        for action in actions:
            if action.metavar in _COMPLETE:
                action.complete = _COMPLETE[action.metavar]
    print(shtab.complete(parser, shell))
    return 0
