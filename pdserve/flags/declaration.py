"""Options that declare their flags: each field of a frozen record says its flag, its help and its range once.

    class Options(msgspec.Struct, frozen=True, kw_only=True):
        block_size: Annotated[int, Flag("tokens per block", metavar="N", at_least=1)] = 16
        threads: Annotated[int | None, Flag("CPU threads", metavar="N", at_least=1, unset="all cores")] = None

``add_flags`` makes ``--block-size N`` and ``--threads N`` of it, ``options_from`` the record of parsed flags, and
``words_of`` a command line of the record. ``check_ranges`` refuses records with values out of range. The help text ends
with the default. A field without ``Flag`` is not a flag.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from pdserve.errors import ConfigError, plain
from pdserve.flags.value_types import SIZE_UNITS, number, parse_size, whole_number

Options = TypeVar("Options", bound=msgspec.Struct)
#: Default parsers, by the type of the field.
_PARSERS: Mapping[Any, Callable[[str], Any]] = {int: whole_number, float: number, str: str}


class Flag(msgspec.Struct, frozen=True):
    """The flag of a field. Its name is the field's: ``max_queue`` is ``--max-queue``.

    A bool is a switch, called ``--no-…`` if its default is True. A tuple is one text, unless it is ``repeatable``.
    """

    help: str  # without the default
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None  # parser of one value; None: chosen by the field's type
    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    unset: str = ""  # meaning of a default of None or ""
    alias: str | None = None  # vLLM's name for the flag
    spelling: str | None = None  # the flag, if not named after the field
    shorthand: tuple[str, str] | None = None  # another flag without a value, and the value that it stands for
    repeatable: bool = False
    group: str = ""  # section in the help
    excludes: str = ""  # flags with the same word here exclude each other

    def within(self, group: str) -> Flag:
        """Return the same flag in another section of the help."""
        return msgspec.structs.replace(self, group=group)

    def problem(self, value: Any) -> str:
        """Say what is wrong with a value that is out of range; "" if it is not."""
        if value is None:
            return ""
        if self.choices is not None and value not in self.choices:
            return f"{value!r} is not one of {', '.join(self.choices)}"
        limits = []
        if self.above is not None and not value > self.above:
            limits.append(f"above {plain(self.above)}")
        if self.at_least is not None and not value >= self.at_least:
            limits.append(f"at least {plain(self.at_least)}")
        if self.at_most is not None and not value <= self.at_most:
            limits.append(f"at most {plain(self.at_most)}")
        shown = plain(value) if isinstance(value, float) else value
        return f"{shown} must be {' and '.join(limits)}" if limits else ""


class Field(typing.NamedTuple):
    """A field of options that is a flag."""

    name: str
    type: Any  # without None
    default: Any
    flag: Flag

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def spelling(self) -> str:
        name = "--" + self.name.replace("_", "-")
        return self.flag.spelling or (name.replace("--", "--no-", 1) if self.default is True else name)

    def parse(self, text: str) -> Any:
        """Parse a value of the command line. Raises ArgumentTypeError."""
        try:
            value = (self.flag.parse or _PARSERS[self.type])(text)
        except ConfigError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc
        if self.flag.choices is None and (problem := self.flag.problem(value)):
            raise argparse.ArgumentTypeError(problem)
        return value

    @property
    def help(self) -> str:
        default = self.flag.unset
        if self.flag.parse is parse_size and self.default is not None:
            default = _size(self.default)
        return f"{self.flag.help} (default: {default})" if default else self.flag.help


def fields_of(options: type[msgspec.Struct]) -> Iterator[Field]:
    """Yield the fields that are flags, in their order."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in msgspec.structs.fields(options):
        hint = hints[field.name]
        flag = next((data for data in getattr(hint, "__metadata__", ()) if isinstance(data, Flag)), None)
        if flag is not None:
            yield Field(field.name, _without_none(typing.get_args(hint)[0]), field.default, flag)


def add_flags(parser: argparse.ArgumentParser, options: type[msgspec.Struct], without: Collection[str] = ()) -> None:
    """Add the flags of all fields but ``without``, to sections that other options may have begun."""
    sections: dict[str, argparse._ActionsContainer] = {group.title or "": group for group in parser._action_groups}
    sections[""] = parser
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for field in fields_of(options):
        if field.name in without:
            continue
        title = field.flag.group
        word = field.flag.excludes
        if title not in sections:
            sections[title] = parser.add_argument_group(title)
        section = sections[title]
        if word:
            if word not in exclusive:
                exclusive[word] = section.add_mutually_exclusive_group()
            section = exclusive[word]
        _add(section, field)


def add_flag(parser: argparse.ArgumentParser, name: str, flag: Flag) -> None:
    """Add one flag with a text, to a command that has no options record."""
    _add(parser, Field(name, str, None, flag))


def options_from(options: type[Options], args: argparse.Namespace, **given: Any) -> Options:
    """Return the options of parsed flags. ``given`` are fields without a flag."""
    values = {field.name: getattr(args, field.name) for field in fields_of(options)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return options(**values | given)


def words_of(options: msgspec.Struct) -> list[str]:
    """Return the command line of options: every flag that differs from its default."""
    words: list[str] = []
    for field in fields_of(type(options)):
        value = getattr(options, field.name)
        if value == field.default or value is None:
            continue
        if field.is_switch:
            words.append(field.spelling)
        else:
            texts = map(str, value) if isinstance(value, tuple) else [str(value)]
            values = texts if field.flag.repeatable else [",".join(texts)]
            words += [word for text in values for word in (field.spelling, text)]
    return words


def check_ranges(options: msgspec.Struct) -> None:
    """Raise ConfigError for a value that is out of range or not among the choices."""
    for field in fields_of(type(options)):
        value = getattr(options, field.name)
        if value != field.default and (problem := field.flag.problem(value)):
            raise ConfigError(f"{field.name} {problem}")


def _add(section: argparse._ActionsContainer, field: Field) -> None:
    flag = field.flag
    if field.is_switch:
        action = "store_false" if field.default else "store_true"
        section.add_argument(field.spelling, dest=field.name, action=action, help=flag.help)
        return
    section.add_argument(
        *(field.spelling, flag.alias) if flag.alias else (field.spelling,),
        dest=field.name,
        type=field.parse,
        default=[] if flag.repeatable else field.default,
        choices=flag.choices,
        metavar=flag.metavar,
        action="append" if flag.repeatable else "store",
        help=field.help,
    )
    if flag.shorthand:
        other, value = flag.shorthand
        text = f"the same as {field.spelling} {value}"
        section.add_argument(other, dest=field.name, action="store_const", const=value, help=text)


def _without_none(hint: Any) -> Any:
    """Return the type of a field that may be None, and of a tuple the type of its elements."""
    if isinstance(hint, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def _size(value: int) -> str:
    """Return a size in its largest unit that leaves a whole number."""
    units = [unit for unit in ("GiB", "MiB", "KiB") if value % SIZE_UNITS[unit.upper()] == 0]
    return f"{value // SIZE_UNITS[units[0].upper()]}{units[0]}" if units else str(value)
