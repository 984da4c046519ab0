"""How long silence is believed to be nothing: every limit between nodes follows from one number, ``--peer-timeout``.

    T = 4 s   0 ───────── 1 ───────── 2 ───────── 3 ───────── 4
    gRPC      │ quiet     │ ping … no answer      ╳ connection closed: node stopped, host or network gone
    Describe  │ asked     … no answer             ╳ event loop of the peer hangs     (asked every T/4)
    engine    │ no beat   …           ╳ its front says "stuck"; peers read that within T/4
    NIXL      │ no byte of any read   …           ╳ reads fail, connections are cut
    UCX       │ quiet     │ probe     │ probe     ╳ endpoint dead

So whatever a peer dies of, nobody waits for it longer than T.
"""

from __future__ import annotations

import math

import msgspec

from pdserve.errors import ConfigError

SHORTEST, LONGEST = 1.0, 600.0  # seconds; below the shortest a busy machine would look like a dead one


class PeerTiming(msgspec.Struct, frozen=True):
    """All times are in seconds. Raises ConfigError where ``timeout`` makes no sense."""

    timeout: float = 4.0

    def __post_init__(self) -> None:
        if not SHORTEST <= self.timeout <= LONGEST:
            raise ConfigError(f"--peer-timeout {self.timeout:g} is not within {SHORTEST:g} … {LONGEST:g} seconds")

    @property
    def ask_after(self) -> float:
        """How long a peer may be quiet until it is asked whether it lives."""
        return self.timeout / 4

    @property
    def answer_within(self) -> float:
        """How long it has to answer, and an engine to give its front a sign of life."""
        return self.timeout / 2

    @property
    def stall(self) -> float:
        """How long reads may go without a single byte."""
        return self.timeout * 3 / 4

    @property
    def connect(self) -> float:
        """How long a connector has to connect. Visits to other peers that do not answer may come first."""
        return self.timeout * 4

    @property
    def ucx(self) -> dict[str, str]:
        """Settings of UCX over TCP. Without them connecting to a host that is gone takes 134 s, reading for ever."""
        probe = max(1, int(self.ask_after))  # whole seconds are all that TCP knows
        return {
            "UCX_TCP_USER_TIMEOUT": f"{self.stall:g}s",
            "UCX_TCP_SYN_CNT": str(max(1, int(math.log2(self.stall + 1)) - 1)),  # n repeats take 2^(n+1) - 1 s
            "UCX_TCP_KEEPIDLE": f"{probe}s",
            "UCX_TCP_KEEPINTVL": f"{probe}s",
            "UCX_TCP_KEEPCNT": "2",
        }


DEFAULT_TIMING = PeerTiming()
