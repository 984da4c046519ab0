"""What a decode node can be told beyond what every node can."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailurePolicy(StrEnum):
    """What becomes of a request whose handoff fails."""

    RECOMPUTE = "recompute"  # D prefills it from the token ids it has
    FAIL = "fail"


class DecodeSettings(msgspec.Struct, frozen=True):
    prefill: tuple[str, ...] = ()  # places of prefill nodes, see pdserve/discovery/sources.py
    failure_policy: FailurePolicy = FailurePolicy.RECOMPUTE
    handoff_min_tokens: int = 32
    peer_wait: float = 60.0  # seconds
    require_transport: str = ""  # of pdserve.transports.REQUIRABLE; "": any will do
