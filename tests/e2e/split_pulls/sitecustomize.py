"""Makes nodes pull or split, whatever that costs, and reads fail: Python imports this first.

SPLIT_PULLS names a directory. A node pulls all that a peer has, however long that takes; it and a router predict
PULL_SECONDS for that. While the file "split" exists, it computes the first half meanwhile. While "hold" exists, no read
is posted. While "flip" exists, a bit of each read changes on its way.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from pathlib import Path
from typing import Any


def _patch_plans(switch: Path) -> None:
    from pdserve import request_cost

    seconds = float(os.environ.get("PULL_SECONDS", "0.1"))

    def plan(costs: Any, num_tokens: int, *, split_block: int = 0, **kwargs: Any) -> Any:
        first = num_tokens // 2 // split_block * split_block if split_block and switch.exists() else 0
        return request_cost.LoadPlan(first, num_tokens - first, seconds)

    request_cost.plan_pull = plan
    request_cost.pull_deadline = lambda *args, **kwargs: math.inf


def _patch_reads(hold: Path, flip: Path) -> None:
    from connector.backends.nixl.nixl_connector import NixlConnector

    post = NixlConnector._read
    poll = NixlConnector.poll
    blocks: dict[int, int] = {}  # the last one of each read

    def held_read(self: NixlConnector, read: Any, ordered_at: float) -> None:
        blocks[read.read_id] = read.local_blocks[-1]
        while hold.exists():
            time.sleep(0.01)
        post(self, read, ordered_at)

    def flipping_poll(self: NixlConnector) -> Any:
        output = poll(self)
        for result in output.finished_recving if flip.exists() else ():
            rank = self._rank
            at = rank.region.address + blocks[result.read_id] * rank.layout.block_bytes
            ctypes.c_uint8.from_address(at).value ^= 1
        return output

    NixlConnector._read = held_read  # type: ignore[method-assign]
    NixlConnector.poll = flipping_poll  # type: ignore[method-assign]


if "SPLIT_PULLS" in os.environ:
    directory = Path(os.environ["SPLIT_PULLS"])
    if "engine.process" in sys.orig_argv:
        _patch_reads(directory / "hold", directory / "flip")
    else:
        _patch_plans(directory / "split")
