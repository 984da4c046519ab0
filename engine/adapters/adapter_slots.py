"""The adapters that a node has in host memory, and the slots on the device that steps read them from.

    AddAdapter ─► loading on all ranks ─► known ──RemoveAdapter─► retired ──last request ended─► dropped
                        └─ failed on a rank: dropped on the others

    slot   free ─► given to an adapter, pinned by its sequences ─last one ended─► resident ─► given to another adapter

A slot is pinned while a sequence of its adapter runs, loads KV from a peer, or is part of a step in flight. Pins are
not counted: they follow from the sequences whenever a slot is needed, so none can be left behind. An adapter that no
slot holds gets a free one, or the least recently used one without a pin. Otherwise its requests wait, and others pass
them.

Requests that pass could keep all slots pinned for ever. So after ``_PATIENCE`` seconds the adapter that has held its
slot longest admits no further sequences until the waiting one has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import msgspec

from engine.adapters.adapters import AdapterNames, Adapters, AdapterUsers
from engine.sequence import Sequence
from pdserve.adapters.adapter import NO_ADAPTER, Adapter, AdapterLimits, AdapterSlot
from pdserve.errors import CapacityError, CheckpointError, PdserveError
from pdserve.ipc.messages import AdapterAdded, AddAdapter, EventBatch, RemoveAdapter
from pdserve.records import KVConnectorOrders, ModelRunnerOutput

_PATIENCE = 5.0  # seconds; about the time of an answer of some hundred tokens


class AdapterSlots(Adapters):
    def __init__(
        self, limits: AdapterLimits, users: AdapterUsers, events: EventBatch, clock: Callable[[], float]
    ) -> None:
        """``clock`` is the scheduler's, in seconds."""
        super().__init__(events)
        self._limits = limits
        self._users = users
        self._clock = clock
        self._loading: dict[str, bool] = {}  # by digest: whether new requests may use it then
        self._known: dict[str, None] = {}  # digests
        self._retired: dict[str, None] = {}  # digests, in host memory for the requests that still use them
        self._slots: dict[str, int] = {}  # by digest, the least recently used first
        self._given_at: dict[str, int] = {}  # by digest: number of the slot's last change
        self._num_given = 0
        self._free = list(range(limits.max_loras))
        self._draining = NO_ADAPTER  # digest of the adapter that admits no sequences for now
        self._contended = False  # a sequence has lacked a slot since the last step
        self._loads: list[Adapter] = []  # orders for the ranks
        self._drops: list[str] = []
        self._filled: dict[int, str] = {}  # by slot: digests that the next step copies

    # ------------------------------------------------------------ commands

    def take(self, command: AddAdapter | RemoveAdapter) -> None:
        match command:
            case AddAdapter(adapter):
                try:
                    self._add(adapter)
                except PdserveError as exc:
                    self._answer(adapter.digest, exc)
            case RemoveAdapter(digest):
                if digest in self._loading:
                    self._loading[digest] = False
                elif digest in self._known:
                    del self._known[digest]
                    self._retired[digest] = None

    def _add(self, adapter: Adapter) -> None:
        digest = adapter.digest
        limits = self._limits
        if adapter.rank > limits.max_lora_rank:
            raise CheckpointError(
                f"the adapter has rank {adapter.rank}, the limit is {limits.max_lora_rank}; raise --max-lora-rank"
            )
        if digest in self._loading:
            self._loading[digest] = True
        elif digest in self._known or digest in self._retired:
            self._retired.pop(digest, None)
            self._known[digest] = None
            self._answer(digest)
        else:
            self._drop_unused()
            held = len(self._loading) + len(self._known) + len(self._retired)
            if held >= limits.max_cpu_loras:
                raise CapacityError(
                    f"{held} adapters are in host memory, the limit is {limits.max_cpu_loras}; unload one, or raise "
                    "--max-cpu-loras"
                )
            self._loading[digest] = True
            self._loads.append(adapter)

    def _answer(self, digest: str, error: PdserveError | None = None) -> None:
        kind = "" if error is None else type(error).__name__
        self._events.adapters.append(AdapterAdded(digest, kind, "" if error is None else str(error)))

    # ------------------------------------------------------------ requests

    def has(self, digest: str, begun: bool = False) -> bool:
        return digest == NO_ADAPTER or digest in self._known or (begun and digest in self._retired)

    def lacking(self, ahead: Set[str] = frozenset()) -> Callable[[Sequence], bool]:
        pinned: set[str] | None = None  # None: unknown

        def lacks(sequence: Sequence) -> bool:
            nonlocal pinned
            digest = sequence.request.sampling.adapter
            if digest == NO_ADAPTER:
                return False
            if digest == self._draining and digest in self._slots:
                return True
            if not ahead and (self._free or digest in self._slots):
                return False
            if pinned is None:
                pinned = self._pinned()
            is_lacking = (
                digest not in pinned and len((pinned | ahead | {digest}) - {NO_ADAPTER}) > self._limits.max_loras
            )
            self._contended |= is_lacking
            return is_lacking

        return lacks

    def admit(self, sequence: Sequence) -> None:
        digest = sequence.request.sampling.adapter
        if digest == NO_ADAPTER:
            return
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            self._filled[slot] = digest
            self._num_given += 1
            self._given_at[digest] = self._num_given
        self._slots[digest] = slot
        sequence.use_adapter(slot)

    def _evict(self) -> int:
        """Take the slot of the least recently used adapter without a pin, and return it."""
        pinned = self._pinned()
        digest = next(digest for digest in self._slots if digest not in pinned)
        del self._given_at[digest]
        return self._slots.pop(digest)

    def _pinned(self) -> set[str]:
        return {sequence.request.sampling.adapter for sequence in self._users.with_slots()} - {NO_ADAPTER}

    @property
    def in_use(self) -> AdapterNames:
        waiting = {sequence.request.sampling.adapter for sequence in self._users.waiting()} - {NO_ADAPTER}
        return AdapterNames(tuple(sorted(self._pinned())), tuple(sorted(waiting)))

    # ------------------------------------------------------------ a step

    def begin(self) -> None:
        """Begin to plan a step: choose the adapter that gives way to a sequence that has waited too long."""
        if not (self._contended or self._draining):
            return
        self._contended = False
        latest = self._clock() - _PATIENCE
        starves = any(
            sequence.request.sampling.adapter not in self._slots
            and sequence.request.sampling.adapter != NO_ADAPTER
            and sequence.request.waits_since < latest
            for sequence in self._users.waiting()
        )
        if not starves:
            self._draining = NO_ADAPTER
        elif self._draining not in self._slots:
            self._draining = min(self._slots, key=lambda digest: self._given_at[digest])

    def take_slots(self) -> tuple[AdapterSlot, ...]:
        filled = tuple(AdapterSlot(slot, digest) for slot, digest in self._filled.items())
        self._filled = {}
        return filled

    # ------------------------------------------------------------ ranks

    @property
    def has_orders(self) -> bool:
        return bool(self._loads or self._drops or self._filled or self._unused())

    def add_orders(self, orders: KVConnectorOrders) -> KVConnectorOrders:
        self._drop_unused()
        if not (self._loads or self._drops):
            return orders
        orders = msgspec.structs.replace(orders, adapters=tuple(self._loads), dropped_adapters=tuple(self._drops))
        self._loads = []
        self._drops = []
        return orders

    def update(self, output: ModelRunnerOutput) -> None:
        for loaded in output.connector.adapters:
            digest = loaded.digest
            is_wanted = self._loading.pop(digest)
            if loaded.error:
                self._drops.append(digest)  # on the ranks that have loaded it
                self._answer(digest, CheckpointError(loaded.error))
                continue
            (self._known if is_wanted else self._retired)[digest] = None
            self._answer(digest)

    def _unused(self) -> list[str]:
        """Return the retired adapters that no request and no step needs any more."""
        if not self._retired:
            return []
        used = {request.sampling.adapter for request in self._users.requests()} | self._pinned()
        return [digest for digest in self._retired if digest not in used]

    def _drop_unused(self) -> None:
        for digest in self._unused():
            del self._retired[digest]
            self._drops.append(digest)
            slot = self._slots.pop(digest, None)
            if slot is not None:
                del self._given_at[digest]
                self._filled.pop(slot, None)
                self._free.append(slot)
