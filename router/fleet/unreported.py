"""Requests that were sent to a node and that its reports do not include yet.

Their sums are kept: a client's request may have a thousand prompts, and each one is placed by the load so far.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pdserve.kv.groups import Windows, blocks_for


class SentRequest(NamedTuple):
    at: float  # time it was sent
    uncached_tokens: int  # prompt tokens that the node computes
    num_tokens: int  # tokens that need room
    for_peer: bool  # another node decodes it


class UnreportedRequests:
    def __init__(self) -> None:
        self.uncached_tokens = 0
        self.for_peers = 0
        self._requests: deque[SentRequest] = deque()
        self._shape: tuple[Windows, int] = (None,), 1  # that ``_blocks`` are counted in
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: SentRequest) -> None:
        self._requests.append(request)
        self._count(request, 1)

    def drop_before(self, time: float) -> None:
        """Drop the requests that were sent before ``time``."""
        while self._requests and self._requests[0].at < time:
            self._count(self._requests.popleft(), -1)

    def blocks(self, windows: Windows, block_size: int) -> int:
        """Return the KV blocks that the requests need, of ``block_size`` tokens in groups with these windows."""
        shape = windows, block_size
        if shape != self._shape:
            self._shape = shape
            self._blocks = sum(blocks_for(windows, request.num_tokens, block_size) for request in self._requests)
        return self._blocks

    def _count(self, request: SentRequest, sign: int) -> None:
        self.uncached_tokens += sign * request.uncached_tokens
        self.for_peers += sign * request.for_peer
        windows, block_size = self._shape
        self._blocks += sign * blocks_for(windows, request.num_tokens, block_size)
