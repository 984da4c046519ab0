"""Kinds of connections between nodes, and how they compare."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

KINDS = ("tcp", "shm", "rdma", "nvlink")  # from the slowest on; a kind meets a requirement for itself and those before
REQUIRABLE = ("rdma", "nvlink", "shm")
UNKNOWN = "unknown"


class Connected(msgspec.Struct, frozen=True, array_like=True):
    """A connection to one life of a peer, and the way its bytes take: one of KINDS or UNKNOWN."""

    epoch: str
    transport: str
    lanes: str = ""  # what that was told from, in the words of the library below

    def meets(self, required: str) -> bool:
        """Whether it is of kind ``required`` or of a faster one."""
        return self.transport in KINDS and KINDS.index(self.transport) >= KINDS.index(required)


def joined(parts: Sequence[Connected]) -> Connected:
    """Connections between ranks of two nodes, all of one epoch, as one: it is what the slowest of them is."""
    (epoch,) = {part.epoch for part in parts}
    kinds = [part.transport for part in parts]
    transport = UNKNOWN if UNKNOWN in kinds else min(kinds, key=KINDS.index)
    return Connected(epoch, transport, " | ".join(dict.fromkeys(part.lanes for part in parts)))
