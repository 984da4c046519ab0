"""A fetch: cached blocks on their way from host memory to the device, and then blocks that are kept for a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.tiers.areas import Area
from engine.tiers.host_pool import HostEntry
from pdserve.kv.host_copies import HostCopy


@dataclass(slots=True, eq=False)
class Part:
    """The blocks of one area that a fetch loads."""

    area: Area
    places: list[tuple[int, int]] = field(default_factory=list)  # logical block and group of each
    entries: list[HostEntry] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # once they are taken

    def add(self, index: int, group: int, entry: HostEntry) -> None:
        self.places.append((index, group))
        self.entries.append(entry)


@dataclass(slots=True, eq=False)
class Fetch:
    """A load of ``kv`` and ``slots``. It ends with its copy and its digests."""

    sequence: Sequence
    num_tokens: int  # prompt tokens that this fetch spares
    kv: Part
    slots: Part | None  # None: the model has no recurrent layers
    size: float = 0.0  # in blocks
    tokens_from_disk: int = 0  # known once its digests are compared
    kept: list[tuple[Area, list[int]]] = field(default_factory=list)
    ordered_at: float = 0.0
    expected: float = 0.0  # predicted seconds; 0: unknown
    compute: float = 0.0  # predicted seconds to compute its tokens; 0: unknown
    generation: int = 0  # counts changes of the weights
    awaited: bool = True  # its sequence, or a pull, waits for it
    answer: Callable[[], None] | None = None  # called at the end, if it is for a pull
    ended: bool = False

    @property
    def parts(self) -> list[Part]:
        return [self.kv] if self.slots is None else [self.kv, self.slots]

    @property
    def num_unverified(self) -> int:
        """Logical blocks that come from a tier below host memory, and whose digests have not been compared yet."""
        places = zip(self.kv.places, self.kv.entries, strict=True)
        return len({index for (index, _), entry in places if not entry.verified})

    @property
    def num_entries(self) -> int:
        return sum(len(part.entries) for part in self.parts)

    def entries(self) -> Iterator[tuple[Area, HostEntry]]:
        """Yield what it loads, in the order of its digests."""
        for part in self.parts:
            for entry in part.entries:
                yield part.area, entry

    def copy(self, copy_id: int) -> HostCopy:
        """Return the order of its copy."""
        slots = self.slots or Part(self.kv.area)
        return HostCopy(
            copy_id,
            load=True,
            blocks=tuple(self.kv.blocks),
            host_blocks=tuple(entry.block for entry in self.kv.entries),
            slots=tuple(slots.blocks),
            host_slots=tuple(entry.block for entry in slots.entries),
        )
