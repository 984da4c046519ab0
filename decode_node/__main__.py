"""``python -m decode_node MODEL``: run a decode node, which reads KV caches from prefill nodes and produces tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_node.decode_flags import add_flags
from node.command import NodeParts, role_parser, run_role
from pdserve.flags.parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    return run_role("decode", make_parser(), argv, _load)


def make_parser() -> CommandParser:
    parser = role_parser("pdserve decode", "Produce tokens from KV caches that are read from prefill nodes.")
    add_flags(parser)
    return parser


def _load() -> NodeParts:
    """Import the node's modules, such as gRPC, while its engine imports its own."""
    from decode_node.decode_role import make_role
    from engine.executor.remote_ranks import run_ranks

    return NodeParts(make_role, run_ranks)


if __name__ == "__main__":
    sys.exit(main())
