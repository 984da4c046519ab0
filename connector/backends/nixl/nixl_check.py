"""Checks of ``pdserve doctor``: whether NIXL works on this host, and which transport UCX would use."""

from __future__ import annotations

import os

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.transport import transport_of

# UCX_TLS for each requirement: that transport, and TCP, which detects a peer's death. UCX warns about a transport that
# is missing and leaves it out; then the check shows the fallback that a node would use silently.
_UCX_TLS = {"rdma": "tcp,ib,cuda_copy", "nvlink": "tcp,cuda_ipc,cuda_copy", "shm": "tcp,shm"}


def try_agents(required: str, device: str) -> tuple[str, str]:
    """Connect two NIXL agents of this process; return the transport of that connection and UCX's lanes.

    UCX is limited to ``required`` unless the user has set UCX_TLS; "" is no limit. ``device`` is "cpu" or "cuda".
    Raises ConfigError, CapacityError or PeerError, as a node would.
    """
    limited = bool(required) and "UCX_TLS" not in os.environ
    if limited:
        os.environ["UCX_TLS"] = _UCX_TLS[required]
    try:
        remote, local = NixlAgent("doctor-remote"), NixlAgent("doctor-local ")
        try:
            local.remove(local.add(remote.metadata()))
        finally:
            lanes = ucx.log().take_lanes("doctor-local ")
            local.close()
            remote.close()
    finally:
        if limited:
            del os.environ["UCX_TLS"]
    return transport_of(lanes, device), lanes
