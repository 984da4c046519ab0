"""The transport of a connection, derived from the lanes that UCX chose for it.

UCX names them when it connects: ``rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo cma/memory) ka(tcp/lo)``. TCP is always among
them: it detects the death of the peer. Data takes the fastest lane that can carry the kind of memory. So this is what
UCX can use. UCX also lists ``cuda_ipc`` between GPUs without NVLink, and reads over it only if told to (ucx.py). A
user's setting can undo that: only GB/s show it.
"""

from __future__ import annotations

import re

from pdserve.kv.transports import TRANSPORTS, UNKNOWN

_LANE = re.compile(r"(\w+)/")
_RDMA = re.compile(r"(rc|dc|ud|gga|srd)(_\w+)?")
_SHARED_MEMORY = ("cma", "xpmem", "knem", "posix", "sysv")


def transport_of(lanes: str, device: str) -> str:
    """Return the transport for memory of ``device`` ("cpu" or "cuda"); UNKNOWN without lanes."""
    names = set(_LANE.findall(lanes))
    if not names:
        return UNKNOWN
    return max((_transport_of_lane(name, device) for name in names), key=TRANSPORTS.index)


def _transport_of_lane(name: str, device: str) -> str:
    if name == "cuda_ipc" and device == "cuda":
        return "nvlink"
    if _RDMA.fullmatch(name):
        return "rdma"
    if name in _SHARED_MEMORY and device == "cpu":  # these cannot copy GPU memory
        return "shm"
    return "tcp"
