"""``python -m elastic_node MODEL``: run a node that prefills for other nodes, reads KV from them, and decodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_node.elastic_role import add_flags, make_role
from engine.executor.remote_ranks import run_ranks
from node.command import role_parser, run_role
from pdserve.flags.parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    return run_role(make_parser(), argv, make_role, run_ranks)


def make_parser() -> CommandParser:
    parser = role_parser("pdserve serve", "Prefill and decode: each such node reads KV caches from the others.")
    add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
