"""``python -m elastic_node MODEL``: run a node that prefills for other nodes, reads KV from them, and decodes."""

from __future__ import annotations

import sys

from elastic_node.elastic_flags import add_flags
from node.node_command import NodeParts, NodeProgram


def _load() -> NodeParts:
    from elastic_node.elastic_role import make_role
    from engine.executor.remote_ranks import run_ranks

    return NodeParts(make_role, run_ranks)


PROGRAM = NodeProgram(
    role="both",
    prog="pdserve serve",
    summary="Prefill and decode: each such node reads KV caches from the others.",
    add_flags=add_flags,
    load=_load,
)
make_parser = PROGRAM.make_parser
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
