"""Worker side of the KV connector: it moves blocks between the KV caches of two nodes and says when they have arrived.

``build`` gives one of three connectors, all with the Protocol ``pdserve.protocols.KVConnector``:

    nixl    one-sided reads over UCX, between processes and machines        worker.py, link.py, nixl.py
    local   copies within this process: tests, colocated nodes              local.py
    none    no peers, for a node that exchanges nothing                     null.py

Imports of NIXL happen when a connector is registered, not before.
"""

from __future__ import annotations

from pdserve.errors import ConfigError
from pdserve.protocols import KVConnector
from pdserve.timing import DEFAULT_TIMING, PeerTiming

KINDS = ("nixl", "local", "none")


def build(kind: str, agent: str, timing: PeerTiming = DEFAULT_TIMING) -> KVConnector:
    """A connector of ``kind`` that is known to its peers as ``agent``, a name that no other life of a node ever uses.

    Raises ConfigError for an unknown kind.
    """
    if kind == "nixl":
        from connector.worker import NixlConnector

        return NixlConnector(agent, timing)
    if kind == "local":
        from connector.local import LocalConnector

        return LocalConnector(agent)
    if kind == "none":
        from connector.null import NullConnector

        return NullConnector(agent)
    raise ConfigError(f"connector {kind!r} is not one of {', '.join(KINDS)}")
