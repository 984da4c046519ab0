"""Adapters as the scheduler sees them: the interface, and a node that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple, Protocol

from engine.request import Request
from engine.sequence import Sequence
from pdserve.adapters.adapter import NO_ADAPTER, AdapterSlot
from pdserve.ipc.messages import AdapterAdded, AddAdapter, EventBatch, RemoveAdapter
from pdserve.records import KVConnectorOrders, ModelRunnerOutput


class AdapterUsers(Protocol):
    """The requests and sequences of a scheduler, which adapters only read."""

    def requests(self) -> Iterable[Request]:
        """Open requests, those that wait for their grammar included."""

    def with_slots(self) -> Iterable[Sequence]:
        """Sequences that run or load, and those of steps in flight."""

    def waiting(self) -> Iterable[Sequence]:
        """Sequences that wait to be admitted."""


class AdapterNames(NamedTuple):
    """Digests of adapters in use, sorted."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def _never(sequence: Sequence) -> bool:
    return False


class Adapters:
    """The interface, and a node without adapters: it refuses requests that name one."""

    def __init__(self, events: EventBatch) -> None:
        self._events = events

    # ------------------------------------------------------------ commands

    def take(self, command: AddAdapter | RemoveAdapter) -> None:
        """Carry out a command of the frontend."""
        if isinstance(command, AddAdapter):
            text = "this node takes no adapters; start it with --lora or --allow-weight-changes"
            self._events.adapters.append(AdapterAdded(command.adapter.digest, "ConfigError", text))

    # ------------------------------------------------------------ requests

    def has(self, digest: str, begun: bool = False) -> bool:
        """Return whether new requests, or some that have ``begun``, may use an adapter; the base is always there."""
        return digest == NO_ADAPTER

    def lacking(self, ahead: Set[str] = frozenset()) -> Callable[[Sequence], bool]:
        """Return a function that tells whether a waiting sequence has to wait for a slot.

        ``ahead``: digests of adapters that get their slots before. The answers hold until a sequence is admitted or
        gives up its slot.
        """
        return _never

    def admit(self, sequence: Sequence) -> None:
        """Give a slot to a sequence that does not lack one. It keeps the slot while it runs, loads or is in flight."""

    @property
    def in_use(self) -> AdapterNames:
        """Adapters of running and of waiting sequences."""
        return AdapterNames()

    # ------------------------------------------------------------ a step

    def begin(self) -> None:
        """Begin to plan a step."""

    def take_slots(self) -> tuple[AdapterSlot, ...]:
        """Return the slots that the planned step fills."""
        return ()

    # ------------------------------------------------------------ ranks

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the ranks, or for the next step."""
        return False

    def add_orders(self, orders: KVConnectorOrders) -> KVConnectorOrders:
        """Return orders for all ranks with those of adapters since the last call."""
        return orders

    def update(self, output: ModelRunnerOutput) -> None:
        """Take in the ends of loads."""


AdaptersFactory = Callable[[AdapterUsers, EventBatch, Callable[[], float]], Adapters]


def no_adapters(users: AdapterUsers, events: EventBatch, clock: Callable[[], float]) -> Adapters:
    """Return the object of a node without adapters."""
    return Adapters(events)
