"""What a decode node can be told beyond what every node can, and what it counts."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailurePolicy(StrEnum):
    """What becomes of a request whose handoff fails."""

    RECOMPUTE = "recompute"  # D prefills it from the token ids it has
    FAIL = "fail"


class Settings(msgspec.Struct, frozen=True):
    prefill: tuple[str, ...] = ()  # addresses of prefill nodes
    failure_policy: FailurePolicy = FailurePolicy.RECOMPUTE
    handoff_min_tokens: int = 32
    peer_wait: float = 60.0  # seconds


COUNTERS = (
    "pdserve_requests_total",
    "pdserve_request_failures_total",
    "pdserve_local_prefills_total",  # by choice, not by failure
    "pdserve_handoffs_total",  # begun
    "pdserve_handoff_failures_total",
    "pdserve_handoff_recomputes_total",
    "pdserve_handoff_exposed_seconds_total",  # from P's first token to KV that D may use
    "pdserve_kv_read_bytes_total",
    "pdserve_kv_read_descriptors_total",
    "pdserve_kv_read_seconds_total",
    "pdserve_peer_losses_total",
)


def new_counters() -> dict[str, float]:
    return dict.fromkeys(COUNTERS, 0.0)
