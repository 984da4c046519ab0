"""The JSON of ``/dashboard/state``, for the dashboard's page. Rates are per second.

None means unknown, or no event of that kind.
"""

from __future__ import annotations

import msgspec

STATE_PATH = "/dashboard/state"


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float | None = None
    p99: float | None = None


class LiveTraffic(msgspec.Struct, frozen=True):
    """The router's clients. Rates cover the last 10 s, other counts and quantiles the last minute."""

    running: int  # requests now
    waiting: int  # requests now, for a slot (--max-inflight)
    request_rate: float  # finished requests
    failure_rate: float  # finished requests that failed, client errors excluded
    prompt_token_rate: float
    output_token_rate: float
    cached_share: float | None  # share of prompt tokens found in a prefix cache
    outcomes: dict[str, int]  # finished requests by ok, disconnected, or error type
    ttft: Quantiles
    itl: Quantiles


class LiveModel(msgspec.Struct, frozen=True):
    name: str
    prefill_ready: int
    prefill: int
    decode_ready: int
    decode: int
    served: bool  # a node that takes its requests is ready
    both_ready: int = 0  # nodes of both roles, in no other count
    both: int = 0


class LiveNodeStats(msgspec.Struct, frozen=True):
    """Statistics that the router polls from a node while a dashboard is open; rates over about 10 s."""

    leased_blocks: int
    prompt_token_rate: float
    output_token_rate: float
    cached_share: float | None  # share of prompt tokens in the node's prefix cache
    host_share: float | None  # share of prompt tokens whose KV came from host memory; also in ``cached_share``
    pulled_share: float | None  # share pulled from a peer's cache or moved with a stream; not in ``cached_share``
    tokens_per_drafted_decode: float | None  # output tokens per sequence and step that verifies drafts
    acceptance: float | None  # share of draft tokens that are accepted
    image_rate: float  # images of prompts that the node computes
    encoded_share: float | None  # share of images that were encoded; embeddings of the others were cached


class LiveNode(msgspec.Struct, frozen=True):
    """``state`` is the node's own (loading, connecting, ready, stuck, draining, asleep …), or the router's:

    "lost" after contact, "unreachable" before any, "faulty" if its reports are refused, "unused" for another model or
    role.
    """

    name: str  # "" before contact
    role: str  # prefill, decode or both
    address: str
    model: str
    state: str
    lost_seconds: float | None = None
    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0  # prompt tokens to compute
    backlog_seconds: float = 0.0  # estimated time to compute them
    free_blocks: int = 0
    total_blocks: int = 0
    step_seconds: float | None = None  # estimated decode step at the current batch size
    stats: LiveNodeStats | None = None


class LiveHandoffs(msgspec.Struct, frozen=True):
    """All decode nodes together, over about 10 s; ``exposed`` covers the last minute of polling."""

    total: int  # since the start of each node
    rate: float
    failure_rate: float
    recompute_rate: float
    local_rate: float  # prompts that a policy left to decode nodes
    byte_rate: float
    exposed: Quantiles


class LiveConnection(msgspec.Struct, frozen=True):
    """KV reads of a node from another one, over about 10 s. Nodes without a known name show an address.

    Prefill nodes read only in pulls; their connections are listed while they pull.
    """

    prefill: str  # the source: a decode node in some pulls
    decode: str  # the reader: a prefill node in some pulls
    transport: str  # "none": not connected
    byte_rate: float
    throughput: float | None  # bytes per second of reading time
    read_failure_rate: float


class LiveNow(msgspec.Struct, frozen=True):
    version: str
    models: list[LiveModel]
    traffic: LiveTraffic
    nodes: list[LiveNode]
    handoffs: LiveHandoffs | None  # None until the decode nodes have been polled twice
    connections: list[LiveConnection]  # bounded: broken connections first, then the busiest
    num_connections: int  # all connections
    num_connected: int


class LiveHistory(msgspec.Struct, frozen=True):
    """Parallel lists with one entry per second since the router's start, ascending.

    Rates cover the last 10 s, quantiles the last minute, as in LiveNow. ``kv_prefill`` and ``kv_decode`` are the used
    shares of the ready nodes' KV blocks; ``handoff_*`` and ``kv_read_rate`` are known while a dashboard is open.
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
    handoff_p50: list[float | None]  # exposed seconds, as in LiveHandoffs
    handoff_p99: list[float | None]
    kv_read_rate: list[float | None]  # bytes per second


class LiveReport(msgspec.Struct, frozen=True):
    epoch: str  # random id of the router process
    now: LiveNow
    history: LiveHistory  # after the viewer's last second, or all if the viewer names another epoch
