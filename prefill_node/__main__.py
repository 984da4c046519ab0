"""``python -m prefill_node MODEL``: run a prefill node, which computes KV caches that decode nodes read."""

from __future__ import annotations

import sys

from node.node_command import NodeParts, NodeProgram
from prefill_node.prefill_flags import add_flags


def _load() -> NodeParts:
    from engine.executor.remote_ranks import run_ranks
    from prefill_node.prefill_role import make_role

    return NodeParts(make_role, run_ranks)


PROGRAM = NodeProgram(
    role="prefill",
    prog="pdserve prefill",
    summary="Compute the KV caches of prompts and lease them to decode nodes.",
    add_flags=add_flags,
    load=_load,
)
make_parser = PROGRAM.make_parser
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
