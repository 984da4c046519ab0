"""Where and how a node publishes KV events."""

from __future__ import annotations

from typing import NamedTuple


class KVEventOptions(NamedTuple):
    """The endpoints are ZeroMQ's."""

    endpoint: str
    replay_endpoint: str = ""  # empty: no replays
    topic: str = ""
    as_maps: bool = True  # events; else arrays
