"""Whether NIXL works here, and which way UCX would take: checks of ``pdserve doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.transport import kind_of

# What UCX is left with for a requirement: TCP, which always tells of a peer's death, and that. What it does not have
# here it leaves out with a warning; what it then takes is what a node would silently fall back to.
_ONLY = {"rdma": "tcp,ib,cuda_copy", "nvlink": "tcp,cuda_ipc,cuda_copy", "shm": "tcp,shm"}


def try_agents(required: str, device: str) -> tuple[str, str]:
    """Start two NIXL agents in this process and connect them; the kind of that connection, and UCX's lanes.

    ``device`` is "cpu" or "cuda". Raises ConfigError, CapacityError or PeerError, as a node would.
    """
    with _transports(required):
        there, here = NixlAgent("doctor-there"), NixlAgent("doctor-here ")
        try:
            here.remove(here.add(there.metadata()))
        finally:
            lanes = ucx.log().take_lanes("doctor-here ")
            here.close()
            there.close()
    return kind_of(lanes, device), lanes


@contextmanager
def _transports(required: str) -> Iterator[None]:
    """Limits UCX, unless the user has."""
    if not required or "UCX_TLS" in os.environ:
        yield
        return
    os.environ["UCX_TLS"] = _ONLY[required]
    try:
        yield
    finally:
        del os.environ["UCX_TLS"]
