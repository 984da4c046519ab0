"""Settings that only decode nodes have."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailurePolicy(StrEnum):
    """Treatment of a request whose handoff fails."""

    RECOMPUTE = "recompute"  # D prefills it from its token ids
    FAIL = "fail"


class DecodeSettings(msgspec.Struct, frozen=True):
    prefill: tuple[str, ...] = ()  # sources of prefill nodes, see pdserve/discovery/sources.py
    failure_policy: FailurePolicy = FailurePolicy.RECOMPUTE
    handoff_min_tokens: int = 32
    peer_wait: float = 60.0  # seconds
    require_transport: str = ""  # one of pdserve.transports.REQUIRABLE; empty: any
