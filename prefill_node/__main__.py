"""``python -m prefill_node MODEL``: run a prefill node, which computes KV caches that decode nodes read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from node.command import NodeParts, role_parser, run_role
from pdserve.flags.parser import CommandParser
from prefill_node.prefill_flags import add_flags


def main(argv: Sequence[str] | None = None) -> int:
    return run_role("prefill", make_parser(), argv, _load)


def make_parser() -> CommandParser:
    parser = role_parser("pdserve prefill", "Compute the KV caches of prompts and lease them to decode nodes.")
    add_flags(parser)
    return parser


def _load() -> NodeParts:
    """Import the node's modules, such as gRPC, while its engine imports its own."""
    from engine.executor.remote_ranks import run_ranks
    from prefill_node.prefill_role import make_role

    return NodeParts(make_role, run_ranks)


if __name__ == "__main__":
    sys.exit(main())
