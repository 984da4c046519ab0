"""Options declare their flags on their fields: parsing, help, command lines and ranges follow."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.flags.declaration import Flag, add_flags, check_ranges, options_from, words_of
from pdserve.flags.parser import CommandParser
from pdserve.flags.value_types import parse_size, words
from pdserve.ranges import Range


class Options(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""  # not a flag
    size: Annotated[int | None, Flag("bytes", metavar="N", at_least=1, unset="all", alias="--bytes")] = None
    room: Annotated[int, Flag("memory", metavar="SIZE", parse=parse_size)] = 3 << 20
    share: Annotated[float, Flag("part", above=0, at_most=1, group="parts")] = 0.5
    mode: Annotated[str, Flag("how", choices=("auto", "off"), shorthand=("--no-mode", "off"))] = "auto"
    names: Annotated[tuple[str, ...], Flag("names", parse=words, excludes="names")] = ()
    name: Annotated[tuple[str, ...], Flag("a name", repeatable=True, excludes="names")] = ()
    page: Annotated[bool, Flag("no page")] = True
    quiet: Annotated[bool, Flag("say nothing")] = False


def parser() -> CommandParser:
    made = CommandParser(prog="it")
    add_flags(made, Options)
    return made


def parse(*argv: str) -> Options:
    return options_from(Options, parser().parse_args(argv), model="m")


def test_defaults_are_those_of_the_fields() -> None:
    assert parse() == Options(model="m")
    assert words_of(Options(model="m")) == []


@pytest.mark.parametrize(
    "options",
    [
        Options(size=3, room=4096, share=1.0, mode="off"),
        Options(names=("a", "b"), page=False, quiet=True),
        Options(name=("a", "b")),
    ],
)
def test_command_line_of_options_gives_them_back(options: Options) -> None:
    assert parse(*words_of(options)) == msgspec.structs.replace(options, model="m")


def test_other_spellings_set_the_same_field() -> None:
    assert parse("--bytes", "2", "--no-mode") == Options(model="m", size=2, mode="off")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--size 0", "--size/--bytes: 0 must be at least 1"),
        ("--size x", "'x' is not a whole number"),
        ("--share 0", "--share: 0 must be above 0"),
        ("--share nan", "--share: nan must be above 0 and at most 1"),
        ("--mode on", "--mode: invalid choice"),
        ("--name a --names b", "not allowed with argument"),
    ],
)
def test_values_out_of_range_are_refused(argv: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(*argv.split())


def test_ranges_hold_for_records_too() -> None:
    check_ranges(Options(size=1, share=1.0))
    with pytest.raises(ConfigError, match="size 0 must be at least 1"):
        check_ranges(Options(size=0))
    with pytest.raises(ConfigError, match="mode 'on' is not one of auto, off"):
        check_ranges(Options(mode="on"))


def test_help_ends_with_the_default() -> None:
    text = re.sub(r"\s+", " ", parser().format_help())
    for line in ("bytes (default: all)", "memory (default: 3MiB)", "part (default 0.5)", "how (default auto)"):
        assert line in text
    assert "--no-page no page --quiet say nothing parts: --share" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(10_000_000.0, "10000000"), (1_234_567.0, "1234567"), (86_400.0, "86400"), (0.25, "0.25"), (1e-5, "0.00001")],
)
def test_limits_have_all_digits_and_no_exponent(number: float, text: str) -> None:
    assert Flag("it", at_most=number).problem(number * 2).endswith(f" must be at most {text}")
    assert str(Range(high=number)).endswith(f" at most {text}")
