"""The parser of all commands. Errors are one sentence: an unknown flag names the one that was meant."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from pdserve.errors import ConfigError
from pdserve.flags.meanings import describe_unknown, translated, with_our_values
from pdserve.flags.sources import FlagSources, add_config_flag


class _HelpFormatter(argparse.HelpFormatter):
    """Adds the default to each help text that says nothing about it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = (
            action.option_strings and action.nargs != 0 and action.default not in (None, argparse.SUPPRESS, "", [], ())
        )
        if not shown or "default" in (action.help or ""):
            return action.help
        number = "g" if isinstance(action.default, float) else "s"
        return f"{action.help} (default %(default){number})"


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)
        self._sources: FlagSources | None = None  # only with add_config_flag
        self._problems: list[str] = []  # wrong values of the command line that is parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(". Also, ".join([*self._problems, self._with_source(message)]))

    def _with_source(self, message: str) -> str:
        argument = re.match(r"argument (\S+):", message)
        source = self._sources.of_argument(argument[1]) if self._sources and argument else ""
        return f"{message} (see {self.prog} --help{f'; given by {source}' if source else ''})"

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Parse the values of an argument; a wrong value of a flag is kept for the error, which names all of them."""
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as exc:
            if not action.option_strings:
                raise
            self._problems.append(self._with_source(str(exc)))
            return action.default

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but raise for unknown arguments here, where the subcommand's flags are known."""
        words = sys.argv[1:] if args is None else list(args)
        takes_model = any(action.dest == "model" and not action.option_strings for action in self._actions)
        words = translated(words, self._option_string_actions, self._say, takes_model)
        if "--config" in self._option_string_actions:
            self._sources = FlagSources(self, words, self._describe_unknown)
            words = self._sources.words
        self._problems = []
        parsed, unknown = super().parse_known_args(with_our_values(words, self._say), namespace)
        flags = [word for word in unknown if word.startswith("-")] or unknown[:1]
        problems = [*self._problems, *map(self._describe_unknown, flags)]
        if problems:
            raise ConfigError(". Also, ".join(problems))
        if self._sources is not None:
            parsed.flag_sources = self._sources.by_dest
        return parsed, unknown

    def _say(self, text: str) -> None:
        print(f"{self.prog}: {text}", file=sys.stderr)

    def _describe_unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r} (see {self.prog} --help)"
        return describe_unknown(argument.split("=", 1)[0], self._option_string_actions, self.prog)


def command_parser(prog: str, description: str) -> CommandParser:
    """Return a parser whose flags may also come from a file and the environment (sources.py)."""
    parser = CommandParser(prog=prog, description=description)
    add_config_flag(parser)
    return parser
