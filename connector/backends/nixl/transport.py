"""Which way the bytes of a connection take, told from the lanes that UCX chose for it.

UCX names them when it connects: ``rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo cma/memory) ka(tcp/lo)``. TCP is always among
them, since it tells of a peer's death; bytes take the fastest lane that can carry the kind of memory at hand. So what
is told here is what UCX can use. It also lists ``cuda_ipc`` between GPUs that have no NVLink, and then does not read
that way: only the GB/s of a connection show it.
"""

from __future__ import annotations

import re

from pdserve.transports import KINDS, UNKNOWN

_LANE = re.compile(r"(\w+)/")
_RDMA = re.compile(r"(rc|dc|ud|gga|srd)(_\w+)?")
_SHARED_MEMORY = ("cma", "xpmem", "knem", "posix", "sysv")


def kind_of(lanes: str, device: str) -> str:
    """One of pdserve.transports.KINDS for memory of ``device``, "cpu" or "cuda"; UNKNOWN where no lanes are known."""
    names = set(_LANE.findall(lanes))
    if not names:
        return UNKNOWN
    return max((_kind_of_lane(name, device) for name in names), key=KINDS.index)


def _kind_of_lane(name: str, device: str) -> str:
    if name == "cuda_ipc" and device == "cuda":
        return "nvlink"
    if _RDMA.fullmatch(name):
        return "rdma"
    if name in _SHARED_MEMORY and device == "cpu":  # they cannot copy what is on a GPU
        return "shm"
    return "tcp"
