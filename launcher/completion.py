"""``pdserve completion SHELL``: print a completion script, made by shtab from the parsers of all commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import shtab

import decode_node.__main__
import elastic_node.__main__
import prefill_node.__main__
import router.options
from launcher import doctor, up_flags
from pdserve import cli
from pdserve.config.flags import CommandParser
from pdserve.process import run_command

SHELLS = ("bash", "zsh", "fish")
_COMPLETE = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY}  # by metavar


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(make_parser().parse_args(argv)))


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve completion",
        description='Print a completion script. bash: eval "$(pdserve completion bash)" in ~/.bashrc; zsh: write it to '
        "_pdserve in a folder of $fpath; fish: to ~/.config/fish/completions/pdserve.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


#: The parsers of ``cli.PROGRAMS``.
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "up": up_flags.make_parser,
    "prefill": prefill_node.__main__.make_parser,
    "decode": decode_node.__main__.make_parser,
    "serve": elastic_node.__main__.make_parser,
    "router": router.options.make_parser,
    "doctor": doctor.make_parser,
    "completion": make_parser,
}


def parsers_by_command(parser: argparse.ArgumentParser | None = None) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands; those of programs are put into ``parser``, that of ``pdserve``."""
    parser = parser or cli.make_parser()
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    commands.choices.update({name: make() for name, make in PARSERS.items()})
    return dict(commands.choices)


def _run(args: argparse.Namespace) -> int:
    parser = cli.make_parser()
    for command in parsers_by_command(parser).values():
        actions: list[Any] = command._actions  # shtab reads an attribute that argparse does not declare
        for action in actions:
            if action.metavar in _COMPLETE:
                action.complete = _COMPLETE[action.metavar]
    print(shtab.complete(parser, args.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
