"""Transports between nodes and their order by speed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

TRANSPORTS = ("tcp", "shm", "rdma", "nvlink")  # slowest first; each also meets the requirements of slower ones
REQUIRABLE = ("rdma", "nvlink", "shm")
UNKNOWN = "unknown"


class Connected(msgspec.Struct, frozen=True, array_like=True):
    """A connection to one epoch of a peer, and its transport: one of TRANSPORTS or UNKNOWN."""

    epoch: str
    transport: str
    lanes: str = ""  # UCX's list of the transports it may use

    def meets(self, required: str) -> bool:
        return self.transport in TRANSPORTS and TRANSPORTS.index(self.transport) >= TRANSPORTS.index(required)

    def shortfall(self, required: str) -> str:
        """Return how the transport misses ``--require-transport`` and the remedy; empty if it meets it."""
        if not required or self.meets(required):
            return ""
        remedy = "unset UCX_LOG_LEVEL and UCX_LOG_FILE, which hide UCX's lanes"
        if self.lanes:
            check = "check UCX_TLS, UCX_NET_DEVICES and the output of `ucx_info -d` on both nodes"
            remedy = f"UCX can use {self.lanes}; {check}"
        return f"is {self.transport}, --require-transport asks for {required}: {remedy}"


def combine(ranks: Sequence[Connected]) -> Connected:
    """Combine the connections between the ranks of two nodes, all of one epoch: the slowest transport counts."""
    (epoch,) = {rank.epoch for rank in ranks}
    transports = [rank.transport for rank in ranks]
    transport = UNKNOWN if UNKNOWN in transports else min(transports, key=TRANSPORTS.index)
    return Connected(epoch, transport, " | ".join(dict.fromkeys(rank.lanes for rank in ranks)))
