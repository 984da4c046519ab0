"""``python -m elastic_node MODEL``: run a node that prefills for other nodes, reads KV from them, and decodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_node.elastic_flags import add_flags
from node.command import NodeParts, role_parser, run_role
from pdserve.flags.parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    return run_role("both", make_parser(), argv, _load)


def make_parser() -> CommandParser:
    parser = role_parser("pdserve serve", "Prefill and decode: each such node reads KV caches from the others.")
    add_flags(parser)
    return parser


def _load() -> NodeParts:
    """Import the node's modules, such as gRPC, while its engine imports its own."""
    from elastic_node.elastic_role import make_role
    from engine.executor.remote_ranks import run_ranks

    return NodeParts(make_role, run_ranks)


if __name__ == "__main__":
    sys.exit(main())
