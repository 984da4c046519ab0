"""What a router tells at ``/dashboard/state``: its page and ``pdserve top`` show it. A rate is per second.

What is None is not known, or nothing of the kind has happened.
"""

from __future__ import annotations

import msgspec

STATE_PATH = "/dashboard/state"


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float | None = None
    p99: float | None = None


class LiveTraffic(msgspec.Struct, frozen=True):
    """Of the router's clients. Rates are of the last 10 s, all else of the last minute."""

    running: int  # requests now
    waiting: int  # requests now, for a place (--max-inflight)
    request_rate: float  # that have ended
    failure_rate: float  # of these, by no fault of the client
    prompt_token_rate: float
    output_token_rate: float
    cached_share: float | None  # of prompt tokens, in a prefix cache
    outcomes: dict[str, int]  # how requests have ended: ok, disconnected, or the kind of error
    ttft: Quantiles
    itl: Quantiles


class LiveModel(msgspec.Struct, frozen=True):
    """How many of its nodes are ready, of how many."""

    name: str
    prefill_ready: int
    prefill: int
    decode_ready: int
    decode: int


class Measured(msgspec.Struct, frozen=True):
    """What only the node knows, asked for while somebody looks; rates of some 10 s."""

    leased_blocks: int
    prompt_token_rate: float
    output_token_rate: float
    cached_share: float | None  # of prompt tokens, in its prefix cache


class LiveNode(msgspec.Struct, frozen=True):
    """``state`` is one of the node's own (loading, connecting, ready, stuck, draining), or one that the router gives:

    "lost" and "unreachable", whether it has been heard of or never was, and "unused", where it serves another model or
    is of another role.
    """

    name: str  # "" while it is not known
    role: str  # prefill or decode
    address: str
    model: str
    state: str
    lost_seconds: float | None = None  # since it was lost
    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0  # of prompts, to be computed here
    backlog_seconds: float = 0.0  # that these will take
    free_blocks: int = 0
    total_blocks: int = 0
    step_seconds: float | None = None  # of a decode node, with as many sequences as run
    measured: Measured | None = None


class LiveHandoffs(msgspec.Struct, frozen=True):
    """Of all decode nodes together, of some 10 s; ``exposed`` of the last minute in which somebody has looked."""

    rate: float
    failure_rate: float
    recompute_rate: float
    local_rate: float  # prompts prefilled on decode nodes by choice
    byte_rate: float
    exposed: Quantiles


class LiveLink(msgspec.Struct, frozen=True):
    """From a prefill node to a decode node, of some 10 s. Names are addresses where nothing better is known."""

    prefill: str
    decode: str
    transport: str  # "none" while not connected
    byte_rate: float
    speed: float | None  # bytes per second of those in which something was being read
    read_failure_rate: float


class LiveNow(msgspec.Struct, frozen=True):
    """``links`` are those that are not connected, then the busiest of all ``num_links``, so many at most.

    ``handoffs`` is None until decode nodes have been asked twice.
    """

    version: str
    models: list[LiveModel]
    traffic: LiveTraffic
    nodes: list[LiveNode]
    handoffs: LiveHandoffs | None
    links: list[LiveLink]
    num_links: int
    num_connected: int


class LiveHistory(msgspec.Struct, frozen=True):
    """A point for each of ``seconds``, ascending, counted since the router's start.

    Rates are of one second, times of the 10 s up to it, shares of KV blocks of ready nodes.
    """

    seconds: list[int]
    requests: list[float]
    failures: list[float]
    output_tokens: list[float]
    running: list[int]
    waiting: list[int]
    ttft_p50: list[float | None]
    ttft_p99: list[float | None]
    itl_p50: list[float | None]
    itl_p99: list[float | None]
    kv_prefill: list[float | None]
    kv_decode: list[float | None]


class LiveReport(msgspec.Struct, frozen=True):
    """``history`` has the seconds after the one asked for, where ``life``, drawn at the router's start, is the same."""

    life: str
    now: LiveNow
    history: LiveHistory
