"""Settings of reads from peers, with their flags."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.discovery.sources import ADDRESS_FORMS, check_source
from pdserve.flags.declaration import Flag
from pdserve.kv.transports import REQUIRABLE


class ReadSettings(msgspec.Struct, frozen=True, kw_only=True):
    kv_source: Annotated[
        tuple[str, ...],
        Flag(
            f"nodes of any role whose prefix cache this node may read, beside --prefill: {ADDRESS_FORMS}; repeatable",
            metavar="SOURCE",
            parse=check_source,
            repeatable=True,
            group="handoff",
        ),
    ] = ()
    require_transport: Annotated[
        str,
        Flag(
            "refuse connections to nodes that KV is read from if they are slower than KIND: shm (memory shared by "
            "processes of a host: UCX's cma, sysv, posix, xpmem, knem; not for KV on GPUs), rdma (network cards with "
            "remote DMA: rc, dc, ud, srd, gga) or nvlink (between GPUs of a host: cuda_ipc). Each accepts the kinds "
            "after it; plain TCP satisfies none. Judged by the lanes that UCX chose, not by their speed",
            metavar="KIND",
            choices=REQUIRABLE,
            unset="any, with a warning for TCP",
            group="handoff",
        ),
    ] = ""
