"""Checks of ``pdserve doctor``: whether NIXL works on this host, and which transport UCX would use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.transport import transport_of

# UCX_TLS for each requirement: that transport, and TCP, which detects a peer's death. UCX warns about a transport that
# is missing and leaves it out; then the check shows the fallback that a node would use silently.
_UCX_TLS = {"rdma": "tcp,ib,cuda_copy", "nvlink": "tcp,cuda_ipc,cuda_copy", "shm": "tcp,shm"}


def try_agents(required: str, device: str) -> tuple[str, str]:
    """Connect two NIXL agents of this process; return the transport of that connection and UCX's lanes.

    ``device`` is "cpu" or "cuda". Raises ConfigError, CapacityError or PeerError, as a node would.
    """
    with _transports(required):
        remote, local = NixlAgent("doctor-remote"), NixlAgent("doctor-local ")
        try:
            local.remove(local.add(remote.metadata()))
        finally:
            lanes = ucx.log().take_lanes("doctor-local ")
            local.close()
            remote.close()
    return transport_of(lanes, device), lanes


@contextmanager
def _transports(required: str) -> Iterator[None]:
    """Set UCX_TLS for the requirement, unless the user has set it."""
    if not required or "UCX_TLS" in os.environ:
        yield
        return
    os.environ["UCX_TLS"] = _UCX_TLS[required]
    try:
        yield
    finally:
        del os.environ["UCX_TLS"]
