"""``python -m prefill_node MODEL``: a node that turns prompts into KV caches for decode nodes to read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.frontend.node_command import role_parser, run_role
from prefill_node.prefill_role import add_flags, make_role


def main(argv: Sequence[str] | None = None, prog: str = "pdserve prefill") -> int:
    """Run until stopped; returns the exit status."""
    parser = role_parser(prog, "Serve prompts: compute their KV caches and lease them to decode nodes.")
    parser.set_defaults(shared_mlps="on")
    add_flags(parser)
    return run_role(parser, argv, make_role)


if __name__ == "__main__":
    sys.exit(main())
