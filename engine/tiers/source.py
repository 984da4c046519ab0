"""A source of host memory: blocks that are brought there before a fetch copies them to the device, as from a disk."""

from __future__ import annotations

from engine.sequence import Sequence
from pdserve.kv.disk_transfers import AnyDiskOrder
from pdserve.records import ModelRunnerOutput


class Source:
    """The interface, and host memory without a source."""

    def considered(self, sequence: Sequence) -> bool:
        """Whether ``read`` has decided about a waiting sequence."""
        return True

    def read(self, sequence: Sequence) -> bool:
        """Begin to read blocks that host memory lacks for a waiting sequence, if that is faster than computing them.

        The first call decides. Return whether the sequence waits for a read now.
        """
        return False

    def reading(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a read."""
        return False

    def let_go(self, sequence: Sequence) -> None:
        """Let blocks that were read for a sequence be evicted: host memory has decided about its fetch."""

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence: it has its blocks, or does not wait for them any more."""

    def forget(self) -> None:
        """Use no block that is there or being read, as the weights change."""

    def use_weights(self, version: str) -> None:
        """See ``Tiers.use_weights``."""

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def has_orders(self) -> bool:
        return False

    def take_orders(self) -> tuple[AnyDiskOrder, ...]:
        return ()

    def update(self, output: ModelRunnerOutput) -> None:
        """Take in the ends of reads and writes."""
