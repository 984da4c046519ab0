"""``python -m prefill_node MODEL``: run a prefill node, which computes KV caches that decode nodes read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.executor.remote_ranks import run_ranks
from node.command import role_parser, run_role
from pdserve.flags.parser import CommandParser
from prefill_node.prefill_role import add_flags, make_role


def main(argv: Sequence[str] | None = None) -> int:
    return run_role(make_parser(), argv, make_role, run_ranks)


def make_parser() -> CommandParser:
    parser = role_parser("pdserve prefill", "Compute the KV caches of prompts and lease them to decode nodes.")
    add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
