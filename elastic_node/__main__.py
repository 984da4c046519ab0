"""``python -m elastic_node MODEL``: run a node that prefills for other nodes, reads KV from them, and decodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_node.elastic_role import add_flags, make_role
from engine.frontend.node_command import role_parser, run_role


def main(argv: Sequence[str] | None = None, prog: str = "pdserve serve") -> int:
    parser = role_parser(prog, "Prefill and decode: each such node reads KV caches from the others.")
    add_flags(parser)
    return run_role(parser, argv, make_role)


if __name__ == "__main__":
    sys.exit(main())
