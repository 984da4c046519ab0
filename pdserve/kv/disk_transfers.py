"""Records of transfers between host memory and disk: orders of the scheduler, and what the ranks report."""

from __future__ import annotations

from enum import IntEnum

import msgspec

_HASH_BYTES = 16
_DIGEST_BYTES = 8


class BlockName(msgspec.Struct, frozen=True, array_like=True):
    """The name of a block's file: two blocks with one name have the same bytes.

    The hash stands for the tokens up to the end of the block. ``digest`` covers the whole block, on all ranks: so
    the parts of all ranks belong together, and one node has computed all of them.
    """

    slot: bool  # a slot of recurrent state, not a KV block
    group: int  # KV cache group
    block_hash: bytes  # [16]
    digest: int  # int64

    def text(self) -> str:
        """Return the file's name. It begins with the hash."""
        digest = self.digest.to_bytes(_DIGEST_BYTES, "big", signed=True)
        return f"{self.block_hash.hex()}-{digest.hex()}-{'s' if self.slot else 'b'}{self.group}"


def parse_name(text: str) -> BlockName | None:
    """Return the block of a file's name; None if the name is not a block's."""
    try:
        block_hash, digest, kind = text.split("-")
        raw = bytes.fromhex(digest)
        name = BlockName(
            kind[0] == "s", int(kind[1:]), bytes.fromhex(block_hash), int.from_bytes(raw, "big", signed=True)
        )
    except (ValueError, IndexError):
        return None
    return name if len(name.block_hash) == _HASH_BYTES and name.text() == text else None


class DiskWork(IntEnum):
    READ = 0
    WRITE = 1
    REMOVE = 2


class Outcome(IntEnum):
    """The outcome of an order for a block: the worst of all ranks."""

    DONE = 0
    MISSING = 1  # the file is gone, or has another size
    FAILED = 2  # not moved: the disk fails, or lacks room


class OpenDisk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Use the files of this version of the weights in the orders that follow; empty: no files."""

    version: str


class DiskOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks, or slots of recurrent state, to be moved between files and places in host memory."""

    order_id: int  # unique in this engine
    work: DiskWork
    names: tuple[BlockName, ...]
    places: tuple[int, ...]  # place of each block in host memory; ignored for removals
    patience: float = 0.0  # seconds after which the ranks report a read as late; 0: never


AnyDiskOrder = OpenDisk | DiskOrder


class DiskResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A transfer that has ended: it reads and writes no host memory any more."""

    order_id: int
    outcomes: tuple[int, ...]  # ``Outcome`` of each block
    num_bytes: int = 0  # bytes moved
    seconds: float = 0.0
    num_failed: int = 0  # operations that ended with an error
    num_evicted: int = 0  # files of any rank and node, evicted for a write


class DiskLate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A read has not ended within its patience."""

    order_id: int


class DiskListing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks of rank 0 that a scan of its directory has found. After the last part, all others are gone."""

    version: str  # version of the weights that computed the blocks
    names: tuple[BlockName, ...]
    begins: bool = False
    ends: bool = False


DiskEvent = DiskResult | DiskLate | DiskListing
