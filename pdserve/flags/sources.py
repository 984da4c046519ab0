"""Values of flags from a file and from the environment. Command line > environment > file > default.

``max-num-seqs: 64`` in the YAML file, or ``PDSERVE_MAX_NUM_SEQS=64`` in the environment, is ``--max-num-seqs 64``; the
key ``model`` is MODEL. A repeatable flag takes a list, in the environment with commas. A switch takes true or false.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pdserve.errors import ConfigError

COMMAND_LINE = "the command line"
VARIABLE_PREFIX = "PDSERVE_"
_MAX_FILE = 1 << 20  # bytes
_MAX_NESTING = 3  # levels: the mapping, a list of values, and one that is refused by the name of its flag
_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
#: Flags that `pdserve up` gives its processes in the environment, since all users can list command lines.
SECRETS = ("api-key",)
_NEVER = ("help", "version", "config", "status-fd", "lifeline-fd")
#: Kubernetes sets PDSERVE_PORT=tcp://… in every pod beside a Service of the name pdserve.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


class Setting(NamedTuple):
    """The value of one flag, as text; several values for a list."""

    key: str
    values: Sequence[str]
    source: str


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Have a CommandParser read flags from a file and from the environment, too."""
    text = (
        "YAML file of flags by name, such as `max-num-seqs: 64`; PDSERVE_MAX_NUM_SEQS in the environment overrides it"
    )
    parser.add_argument("--config", metavar="FILE", help=text)


class FlagSources:
    """Adds the settings that the command line ``argv`` leaves open. ``unknown`` describes an unknown flag."""

    def __init__(self, parser: argparse.ArgumentParser, argv: Sequence[str], unknown: Callable[[str], str]) -> None:
        self._groups = [[action.dest for action in group._group_actions] for group in parser._mutually_exclusive_groups]
        self._actions = _actions_by_key(parser)
        self._unknown = unknown
        given = _given(parser, argv)
        #: Where the value of a flag comes from, by the flag's name among parsed arguments.
        self.by_dest = dict.fromkeys(given, COMMAND_LINE)
        self._taken = {dest for flag in given for dest in self._exclusive(flag)}
        self._argv = list(argv)
        self._model: list[str] = []  # MODEL, where a file or the environment names it
        self._options: list[str] = []
        if "help" in given:
            return
        if "lifeline_fd" in given:  # a child of `pdserve up`, which resolved all flags; secrets come by the environment
            self._add([setting for setting in self._of_environment(os.environ) if setting.key in SECRETS])
            return
        file = given.get("config") or os.environ.get("PDSERVE_CONFIG", "")
        for settings in (self._of_environment(os.environ), self._of_file(file) if file else ()):
            self._add(list(settings))

    @property
    def words(self) -> list[str]:
        """The command line with all settings as further words."""
        end = self._argv.index("--") if "--" in self._argv else len(self._argv)
        return [*self._model, *self._argv[:end], *self._options, *self._argv[end:]]

    def of_argument(self, name: str) -> str:
        """Return the source of a flag as argparse names it in errors, such as ``--tp/--tensor-parallel-size``."""
        action = self._actions.get(name.split("/")[0].removeprefix("--"))
        return "" if action is None else self.by_dest.get(action.dest, "")

    def _add(self, settings: Iterable[Setting]) -> None:
        """Append the words of settings whose flags have no value yet."""
        taken: dict[str, str] = {}
        for setting in settings:
            action = self._actions[setting.key]
            if action.dest in self._taken:
                continue
            other = next((taken[dest] for dest in self._exclusive(action.dest) if dest in taken), None)
            if other is not None:
                raise ConfigError(f"{setting.source}: {setting.key} and {other} set the same; remove one of them")
            taken[action.dest] = setting.key
            self.by_dest[action.dest] = setting.source
            (self._options if action.option_strings else self._model).extend(_words(action, setting))
        self._taken |= {dest for flag in taken for dest in self._exclusive(flag)}

    def _exclusive(self, dest: str) -> list[str]:
        """Return ``dest`` and the flags that cannot be given with it."""
        return [dest, *(other for group in self._groups if dest in group for other in group if other != dest)]

    def _of_environment(self, environ: Mapping[str, str]) -> Iterator[Setting]:
        """Yield settings of known flags. Others belong to other commands."""
        for key, action in self._actions.items():
            name = _variable(key)
            value = environ.get(name, "")
            if value and not _SERVICE_LINK.match(value):
                yield Setting(key, value.split(",") if _is_list(action) else [value], name)

    def _of_file(self, path: str) -> Iterator[Setting]:
        """Raises ConfigError for a file that is no mapping of known flags to values."""
        import yaml  # on demand: most commands need no file

        try:
            with open(path, "rb") as file:
                data = file.read(_MAX_FILE + 1)
            if len(data) > _MAX_FILE:
                raise ConfigError(f"--config {path} is larger than {_MAX_FILE} bytes; give a file of flags")
            text = data.decode()
            _check_nesting(path, text)
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except OSError as exc:
            raise ConfigError(f"--config {path} cannot be read: {exc.strerror}") from exc
        except (UnicodeDecodeError, yaml.YAMLError) as exc:
            raise ConfigError(f"--config {path} is not YAML: {' '.join(str(exc).split())[:200]}") from exc
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config {path} has no keys; write one flag per line, such as `max-num-seqs: 64`")
        for key, value in [] if root is None else root.value:
            source = f"{path} line {key.start_mark.line + 1}"
            name = str(key.value)[:100].replace("_", "-")
            if name in _NEVER:
                raise ConfigError(f"{source}: {name} is for the command line only")
            if name not in self._actions:
                raise ConfigError(f"{source}: {self._unknown(f'--{name}')}")
            values = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if any(not isinstance(item, yaml.ScalarNode) or item.tag.endswith(":null") for item in values):
                raise ConfigError(f"{source}: {name} needs a value or a list of values")
            yield Setting(name, [item.value for item in values], source)


def _check_nesting(path: str, text: str) -> None:
    """Raises ConfigError if a value holds more than lists: composing takes stack per level."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_NESTING:
                remedy = "a flag has a value or a list of values"
                raise ConfigError(f"{path} line {event.start_mark.line + 1} is nested too deep; {remedy}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _actions_by_key(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the flags that a file or the environment may set, by their names; MODEL is ``model``."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest == "model" and not action.option_strings:
            actions["model"] = action
    for action in parser._actions:
        actions |= {option.removeprefix("--"): action for option in action.option_strings if option.startswith("--")}
    return {key: action for key, action in actions.items() if key not in _NEVER}


def _variable(key: str) -> str:
    return VARIABLE_PREFIX + key.upper().replace("-", "_")


def variables_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the names of the variables of a parser's flags."""
    return frozenset(map(_variable, _actions_by_key(parser)))


def _given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """Return the arguments that the command line sets, with the text after each flag."""
    given: dict[str, str] = {}
    words = iter(argv)
    word = next(words, None)
    while word is not None:
        option, equals, value = word.partition("=")
        action = parser._option_string_actions.get(option)
        if action is None:
            given |= {} if word.startswith("-") else {"model": word}
            word = next(words, None)
            continue
        follows: list[str] = []
        word = next(words, None)
        if not equals and action.nargs != 0:
            while word is not None and not (follows and action.nargs is None) and not word.startswith("--"):
                follows.append(word)
                word = next(words, None)
        given[action.dest] = value if equals else " ".join(follows)
    return given


def _words(action: argparse.Action, setting: Setting) -> list[str]:
    """Return a setting as words of the command line."""
    key, values, source = setting
    if not action.option_strings:
        return list(values)
    option = f"--{key}"
    if action.nargs == 0:
        switch = _SWITCH.get(values[0].lower()) if len(values) == 1 else None
        if switch is None:
            raise ConfigError(f"{source}: {key} is {','.join(values)[:100]!r}; it is a switch: write true or false")
        return [option] if switch else []
    if action.nargs is not None:
        return [option, *values]
    if _is_list(action):
        return [f"{option}={value}" for value in values]
    return [f"{option}={','.join(values)}"]


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction) or action.nargs not in (None, 0, "?")


def describe(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the value and the source of each flag that has been set, by its name."""
    sources: dict[str, str] = getattr(args, "flag_sources", {})
    return {
        dest.replace("_", "-"): {"value": getattr(args, dest), "source": source}
        for dest, source in sorted(sources.items())
    }
