"""Integrity mode: P announces a digest of every block, D compares it with what it has read.

    P   leased   ──order──► digests come with a step's output ──► Leased, with digests ──front──► D
    D   read     ──order──► digests come with a step's output ──► ReadEnded, with an error where they differ

A digest is ordered with the next plan. Nobody waits for it: what it is for goes on when it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from engine.ipc.event_batch import EventBatch
from engine.ipc.messages import Leased
from pdserve.records import DigestOrder

Then = Callable[[tuple[int, ...]], None]  # given a number per block


class BlockDigests:
    """Orders for the runner, and who waits for their answers, which come in the same order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._orders: list[DigestOrder] = []
        self._waiting: deque[Then] = deque()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def order(self, blocks: Sequence[int], num_tokens: int, then: Then) -> None:
        """Digests of blocks of a prompt that end with its first ``num_tokens`` tokens."""
        unused = -num_tokens % self._block_size
        self._orders.append(DigestOrder(tuple(blocks), len(blocks) * self._block_size - unused))
        self._waiting.append(then)

    def take_orders(self) -> tuple[DigestOrder, ...]:
        """All orders since the last call, for the runner to carry out with the next step."""
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def arrived(self, digests: tuple[tuple[int, ...], ...]) -> None:
        """A step that was planned with orders has ended."""
        for each in digests:
            self._waiting.popleft()(each)


class Announcements:
    """Tells the front of leased blocks: at once, or with ``digests`` as soon as there are any."""

    def __init__(self, report: EventBatch, digests: BlockDigests | None) -> None:
        self._report = report
        self._digests = digests

    def add(self, leased: Leased) -> None:
        if self._digests is None:
            self._report.leased.append(leased)
        else:
            self._digests.order(leased.block_ids, leased.num_tokens, partial(self._add_digested, leased))

    def _add_digested(self, leased: Leased, digests: tuple[int, ...]) -> None:
        # Told also if the lease has ended meanwhile, as it would be without digests: somebody waits for the last part.
        self._report.leased.append(msgspec.structs.replace(leased, digests=digests))
