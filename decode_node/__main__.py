"""``python -m decode_node MODEL``: run a decode node, which reads KV caches from prefill nodes and produces tokens."""

from __future__ import annotations

import sys

from decode_node.decode_flags import add_flags
from node.node_command import NodeParts, NodeProgram


def _load() -> NodeParts:
    from decode_node.decode_role import make_role
    from engine.executor.remote_ranks import run_ranks

    return NodeParts(make_role, run_ranks)


PROGRAM = NodeProgram(
    role="decode",
    prog="pdserve decode",
    summary="Produce tokens from KV caches that are read from prefill nodes.",
    add_flags=add_flags,
    load=_load,
)
make_parser = PROGRAM.make_parser
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
