"""Settings of leases, with their flags."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DAY


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    lease_seconds: Annotated[
        float,
        Flag(
            "length of a lease: how long blocks are kept for a peer that does not extend it",
            metavar="S",
            above=0,
            at_most=DAY,
            group="handoff",
        ),
    ] = 3.0
    lease_guard: Annotated[
        float,
        Flag(
            "how much longer blocks are kept after a lease, against clock drift",
            metavar="S",
            at_least=0,
            at_most=DAY,
            group="handoff",
        ),
    ] = 1.0
