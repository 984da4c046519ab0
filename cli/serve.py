"""``pdserve serve``: a node that prefills and decodes, with an OpenAI server beside it if ``--http`` says so."""

from __future__ import annotations

from collections.abc import Sequence

from cli.up import http_node
from elastic_node import __main__ as program
from elastic_node.elastic_flags import add_flags
from pdserve.flags.parser import CommandParser

_PROGRAM = http_node.NodeProgram(
    name="serve",
    module="elastic_node",
    listed_as="--node",
    peers_as="--node",
    make_parser=program.make_parser,
    main=program.main,
    add_role_flags=add_flags,
)


def make_parser() -> CommandParser:
    return http_node.make_parser(_PROGRAM)


def main(argv: Sequence[str] | None = None) -> int:
    return http_node.main(_PROGRAM, argv)
