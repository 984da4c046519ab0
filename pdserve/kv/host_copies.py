"""Records of copies between the device and host memory: orders of the scheduler, and what the ranks report."""

from __future__ import annotations

import msgspec


class HostCopy(msgspec.Struct, frozen=True):
    """Copy ``blocks[i]`` of the device to ``host_blocks[i]`` in host memory, for all i; with ``load`` back.

    ``slots[i]`` and ``host_slots[i]`` are slots of recurrent state, copied in the same direction.
    """

    copy_id: int  # unique in this engine
    load: bool
    blocks: tuple[int, ...] = ()
    host_blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    host_slots: tuple[int, ...] = ()


class CopyResult(msgspec.Struct, frozen=True):
    """A copy that has ended: it reads and writes no memory any more. ``error`` is empty if all bytes were copied."""

    copy_id: int
    error: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class HostRoom(msgspec.Struct, frozen=True, array_like=True):
    """Host memory for copies: the first ``num_blocks`` blocks, and slots of recurrent state."""

    num_blocks: int
    num_slots: int = 0
