"""Timeouts between nodes. All follow from ``--peer-timeout`` T, so no failure of a peer blocks a request longer than T.

T = 4 s   0 ───────── 1 ───────── 2 ───────── 3 ───────── 4
gRPC      │ connecting …          ╳ attempt given up, next one after 0.1 to 1 s
gRPC      │ silent    │ ping … no answer      ╳ connection closed: node stopped, host or network down
Describe  │ called    … no answer             ╳ event loop of the peer hangs     (called every T/4)
engine    │ no heartbeat …        ╳ its frontend reports "stuck"; peers read that within T/4
command   │ not taken between two steps …         ╳ its frontend reports "stuck" (after 4 s at least)
step      │ takes far longer than usual …         ╳ its frontend reports "stalled"; "stuck" after 2 T (8 s at least)
NIXL      │ no byte of any read   …           ╳ reads fail, connections are closed
UCX       │ silent    │ probe     │ probe     ╳ endpoint dead
"""

from __future__ import annotations

import math

import msgspec

from pdserve.errors import ConfigError

SHORTEST = 1.0  # seconds; with less, a busy machine would look dead
LONGEST = 600.0  # seconds


class PeerTiming(msgspec.Struct, frozen=True):
    """Timeouts in seconds. Raises ConfigError unless SHORTEST <= timeout <= LONGEST."""

    timeout: float = 4.0

    def __post_init__(self) -> None:
        if not SHORTEST <= self.timeout <= LONGEST:
            raise ConfigError(f"--peer-timeout {self.timeout:g} is not within {SHORTEST:g} … {LONGEST:g} seconds")

    @property
    def probe_after(self) -> float:
        """Silence of a peer until it is probed."""
        return self.timeout / 4

    @property
    def answer_timeout(self) -> float:
        """Time for a peer's answer to a probe or a gRPC connection, and longest gap between heartbeats of an engine."""
        return self.timeout / 2

    @property
    def stall_timeout(self) -> float:
        """Longest time without a byte from any read of a peer."""
        return self.timeout * 3 / 4

    @property
    def connect_timeout(self) -> float:
        """Time for a connector to connect, which may include probes of other, unresponsive peers."""
        return self.timeout * 4

    @property
    def ucx_settings(self) -> dict[str, str]:
        """UCX settings for TCP. With UCX's defaults, connecting to a dead host takes 134 s and reads never end."""
        probe = max(1, int(self.probe_after))  # TCP takes whole seconds
        return {
            "UCX_TCP_USER_TIMEOUT": f"{self.stall_timeout:g}s",
            "UCX_TCP_SYN_CNT": str(max(1, int(math.log2(self.stall_timeout + 1)) - 1)),  # n retries take 2^(n+1) - 1 s
            "UCX_TCP_KEEPIDLE": f"{probe}s",
            "UCX_TCP_KEEPINTVL": f"{probe}s",
            "UCX_TCP_KEEPCNT": "2",
        }


DEFAULT_TIMING = PeerTiming()
