"""Digests of KV blocks: orders for them, and the callbacks that take them.

The step that fills a block digests it at its end. Blocks that no step writes to are digested beside steps, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count

from pdserve.records import DigestOrder, ModelRunnerOutput

TakeDigests = Callable[[tuple[int, ...]], object]  # called with a digest per block, then the state's


class DigestOrders:
    """Orders name blocks that end with the first ``num_tokens`` tokens of a prompt, and their KV cache groups."""

    def __init__(self) -> None:
        self._of_step: list[DigestOrder] = []  # orders for the next step
        self._of_step_takers: deque[TakeDigests] = deque()  # takers for all unfinished steps, in the order of orders
        self._beside: list[tuple[int, DigestOrder]] = []
        self._beside_takers: dict[int, TakeDigests] = {}  # by number of the order
        self._numbers = count()

    @property
    def any_of_step(self) -> bool:
        return bool(self._of_step)

    @property
    def any_beside(self) -> bool:
        return bool(self._beside)

    def add_to_step(
        self,
        blocks: tuple[int, ...],
        groups: tuple[int, ...],
        num_tokens: int,
        take: TakeDigests,
        state_slots: tuple[int, ...] = (),
        *,
        num_layers: int = 0,
    ) -> None:
        """Order digests of blocks that the next step fills, and of the recurrent state that it leaves in a slot.

        They cover the first ``num_layers`` layers; 0: all.
        """
        self._of_step.append(DigestOrder(blocks, num_tokens, groups, state_slots, num_layers))
        self._of_step_takers.append(take)

    def add(
        self,
        blocks: tuple[int, ...],
        groups: tuple[int, ...],
        num_tokens: int,
        take: TakeDigests,
        state_slots: tuple[int, ...] = (),
        *,
        num_layers: int = 0,
    ) -> None:
        """Order digests beside steps."""
        number = next(self._numbers)
        self._beside.append((number, DigestOrder(blocks, num_tokens, groups, state_slots, num_layers)))
        self._beside_takers[number] = take

    def take_of_step(self) -> tuple[DigestOrder, ...]:
        """Return the orders for the next step."""
        orders = tuple(self._of_step)
        self._of_step = []
        return orders

    def take_beside(self) -> tuple[tuple[int, DigestOrder], ...]:
        """Return the orders that wait for no step, with their numbers."""
        orders = tuple(self._beside)
        self._beside = []
        return orders

    def update(self, output: ModelRunnerOutput) -> None:
        """Pass computed digests to the takers of their orders."""
        for digests in output.step.digests:
            self._of_step_takers.popleft()(digests)
        for number, digests in output.connector.digested:
            self._beside_takers.pop(number)(digests)
