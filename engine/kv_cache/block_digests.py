"""Integrity mode: P announces a digest of every block, D compares it with the digest of what it has read.

    P   leased   ──order──► digests come with a step's output ──► Leased, with digests ──front──► D
    D   read     ──order──► digests come with a step's output ──► ReadEnded, with an error where they differ

A digest is ordered with the next plan. No step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pdserve.records import DigestOrder

Callback = Callable[[tuple[int, ...]], None]  # takes one digest per block


class BlockDigests:
    """Digest orders for the runner, and the callbacks for their results, which come in the same order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._orders: list[DigestOrder] = []
        self._callbacks: deque[Callback] = deque()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def order(self, blocks: Sequence[int], num_tokens: int, callback: Callback) -> None:
        """Order digests of blocks whose last one ends with the first ``num_tokens`` tokens of a prompt."""
        unused = -num_tokens % self._block_size
        self._orders.append(DigestOrder(tuple(blocks), len(blocks) * self._block_size - unused))
        self._callbacks.append(callback)

    def take_orders(self) -> tuple[DigestOrder, ...]:
        """Return the orders since the last call, for the next step."""
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def arrived(self, digests: tuple[tuple[int, ...], ...]) -> None:
        """Pass the digests of a step, one tuple per order, to their callbacks."""
        for of_order in digests:
            self._callbacks.popleft()(of_order)
