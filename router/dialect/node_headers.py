"""Response headers that name the nodes of a request, on routers with a dashboard: that shows the same names."""

from __future__ import annotations

from urllib.parse import quote

from router.gate.rate_limits import Headers
from router.generation.generation import RequestGeneration

PREFILL_NODE = "x-pdserve-prefill-node"
DECODE_NODE = "x-pdserve-decode-node"
_MAX_ID = 100  # characters of a node id


def node_headers(generation: RequestGeneration) -> Headers:
    """Return the headers once a token has arrived.

    Nodes choose their ids freely, so these are percent-encoded, but for the characters of addresses.
    """
    if not generation.options.names_nodes:
        return []
    named = zip((PREFILL_NODE, DECODE_NODE), generation.nodes, strict=True)
    return [(name.encode(), quote(node_id[:_MAX_ID], safe="/:[]").encode()) for name, node_id in named if node_id]
