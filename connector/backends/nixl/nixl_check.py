"""Checks of ``pdserve doctor``: whether NIXL works on this host, and which transport UCX would use."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.transport import transport_of

# UCX_TLS for each requirement: that transport, and TCP, which detects a peer's death. UCX warns about a transport that
# is missing and leaves it out; then the check shows the fallback that a node would use silently.
_UCX_TLS = {"rdma": "tcp,ib,cuda_copy", "nvlink": "tcp,cuda_ipc,cuda_copy", "shm": "tcp,shm"}
_UNAVAILABLE = "not available"  # in UCX's warning of a transport that this machine lacks


class Tried(NamedTuple):
    """The connection of two agents in this process."""

    transport: str
    lanes: str  # UCX's words
    warnings: Sequence[str]  # UCX's, each once


def try_agents(required: str, device: str) -> Tried:
    """Connect two NIXL agents of this process.

    UCX is limited to ``required`` unless the user has set UCX_TLS; "" is no limit. ``device`` is "cpu" or "cuda".
    Raises ConfigError, CapacityError or PeerError, as a node would.
    """
    limited = bool(required) and "UCX_TLS" not in os.environ
    if limited:
        os.environ["UCX_TLS"] = _UCX_TLS[required]
    try:
        with _collected(ucx.logger) as lines:
            remote = NixlAgent("doctor-remote")
            local = NixlAgent("doctor-local ")
            try:
                local.remove(local.add(remote.metadata()))
            finally:
                lanes = ucx.log().take_lanes("doctor-local ")
                local.close()
                remote.close()
    finally:
        if limited:
            del os.environ["UCX_TLS"]
    own = limited and _UNAVAILABLE  # the lanes say it
    return Tried(transport_of(lanes, device), lanes, [line for line in lines if not own or own not in line])


@contextmanager
def _collected(logger: logging.Logger) -> Iterator[Collection[str]]:
    """Keep the warnings of a logger in place of logging them."""
    lines: dict[str, None] = {}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.update({record.getMessage(): None})  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
