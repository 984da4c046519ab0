"""``pdserve decode``: a decode node, with an OpenAI server beside it if ``--http`` says so."""

from __future__ import annotations

from collections.abc import Sequence

from cli.up import http_node
from decode_node import __main__ as program
from decode_node.decode_flags import add_flags
from pdserve.flags.parser import CommandParser

_PROGRAM = http_node.NodeProgram(
    name="decode",
    module="decode_node",
    listed_as="--decode",
    peers_as="--prefill",
    make_parser=program.make_parser,
    main=program.main,
    add_role_flags=add_flags,
)


def make_parser() -> CommandParser:
    return http_node.make_parser(_PROGRAM)


def main(argv: Sequence[str] | None = None) -> int:
    return http_node.main(_PROGRAM, argv)
