"""``pdserve key``: make an API key."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdserve.flags.parser import CommandParser, command_parser
from pdserve.host.process import run_command
from router.gate.api_keys import NAME, key_entry, new_key


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _make_key(make_parser().parse_args(argv).name))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve key", "Make an API key and its entry for `pdserve router --api-keys FILE`.")
    parser.add_argument("name", type=_key_name, metavar="NAME", help="name of the client, in logs and metrics")
    return parser


def _make_key(name: str) -> int:
    """Print the key on stderr, for its user, and the entry for the key file on stdout."""
    key = new_key()
    print(f"API key of {name}, shown only once: {key}", file=sys.stderr)
    print(key_entry(name, key))
    return 0


def _key_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid name; use up to 64 letters, digits, '_', '.' and '-'"
        )
    return text
