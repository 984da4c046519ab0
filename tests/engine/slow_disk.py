"""Files of blocks in memory. Transfers end when a test says so, with the content of the source at that time."""

from __future__ import annotations

from collections.abc import Callable

from slow_host_memory import SlowHostMemory

from pdserve.kv.disk_transfers import (
    AnyDiskOrder,
    BlockName,
    DiskEvent,
    DiskLate,
    DiskListing,
    DiskOrder,
    DiskResult,
    DiskWork,
    OpenDisk,
    Outcome,
)

Files = dict[tuple[str, BlockName], bytearray]  # by version and name


class SlowDisk:
    """Implements pdserve.protocols.DiskKV. ``files`` may be another node's files."""

    def __init__(self, memory: SlowHostMemory, on_progress: Callable[[], None], files: Files | None = None) -> None:
        self.files: Files = {} if files is None else files
        self.orders: dict[int, tuple[str, DiskOrder]] = {}  # by id, with the version
        self.version = ""
        self._memory = memory
        self._on_progress = on_progress
        self._events: list[DiskEvent] = []

    # ------------------------------------------------------------ a DiskKV

    def order(self, order: AnyDiskOrder) -> None:
        if isinstance(order, OpenDisk):
            self.version = order.version
            if self.version:
                self.scan()
            return
        assert order.names, "an empty transfer"
        assert self.version, "a transfer without a version"
        self.orders[order.order_id] = self.version, order

    def poll(self) -> tuple[DiskEvent, ...]:
        events = tuple(self._events)
        self._events = []
        return events

    def close(self) -> None:
        """Nothing to close."""

    # ------------------------------------------------------------ events

    def scan(self) -> None:
        """Report all files in two parts."""
        names = [name for version, name in self.files if version == self.version]
        half = len(names) // 2
        self._events.append(DiskListing(self.version, tuple(names[:half]), begins=True))
        self._events.append(DiskListing(self.version, tuple(names[half:]), ends=True))
        self._on_progress()

    def land(self, order_id: int, *, fails: bool = False) -> None:
        """End a transfer; if it ``fails``, after its first block."""
        version, order = self.orders.pop(order_id)
        outcomes = list[Outcome]()
        for name, place in zip(order.names, order.places, strict=True):
            outcomes.append(Outcome.FAILED if fails and outcomes else self._move(version, order.work, name, place))
        self._events.append(DiskResult(order_id, tuple(outcomes), 1, 1e-3, num_failed=int(fails)))
        self._on_progress()

    def finish(self) -> None:
        for order_id in list(self.orders):
            self.land(order_id)

    def late(self, order_id: int) -> None:
        self._events.append(DiskLate(order_id))
        self._on_progress()

    def _move(self, version: str, work: DiskWork, name: BlockName, place: int) -> Outcome:
        memory, size = self._memory.item(name.slot)
        file = self.files.get((version, name))
        if work is DiskWork.REMOVE:
            self.files.pop((version, name), None)
        elif work is DiskWork.WRITE:
            self.files.setdefault((version, name), memory[place * size : (place + 1) * size])
        elif file is None or len(file) != size:
            return Outcome.MISSING
        else:
            memory[place * size : (place + 1) * size] = file
        return Outcome.DONE
