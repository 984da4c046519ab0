"""Messages between two GPUs of one host, carried by their copy engines: no multiprocessor waits or copies for them.

A kernel that waits for a message (NCCL's) takes multiprocessors from the step that is computed meanwhile, and kernels
that count on all of them then take a second round: two stages were 11 % slower so, with NCCL on a single one.

    sender                                  receiver
    staged ─── copy ──────────────────────► mailbox      K of each, used in turn
    turn ───── copy ──────────────────────► arrived ──── the stream waits for it (cuStreamWaitValue32)
    used ◄──────────────────────── copy ─── turn         when all that reads the mailbox has been done
      └─ the stream waits for it before it copies to the same mailbox again
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.distributed.parallel_state import Lane
from runner.distributed.peer_memory import PeerMemory, map_memory

_TURNS = 1024  # numbers of turns repeat after so many; two uses of one mailbox are closer than that
_ALIGNMENT = 256  # bytes
_FLAG_BYTES = 4
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class CopyLane:
    """One end of it: ``capacity`` mailboxes at the receiver, each for ``most`` elements of ``dtype``."""

    def __init__(self, memory: PeerMemory, capacity: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.side = torch.cuda.Stream(device)
        self._most, self._dtype = most, dtype
        self._memory = memory  # ours first, then the other end's
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._turns = torch.arange(_TURNS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()

    @classmethod
    def open(cls, lane: Lane, capacity: int, most: int, dtype: torch.dtype) -> CopyLane | None:
        """Both ends call it; None for both where they are not GPUs that can write to each other's memory."""
        if lane.device.type != "cuda":
            return None
        mailboxes = 0 if lane.outward else capacity * _mailbox_bytes(most, dtype)
        memory = map_memory(_flags_bytes(capacity) + mailboxes, 0, lambda mine: [mine, lane.swap(mine)])
        return None if memory is None else cls(memory, capacity, most, dtype, lane.device)

    def mailbox(self, index: int) -> Tensor:
        """One of ours, [most]: its memory, which the other end writes to."""
        interface = {
            "shape": (self._most * self._dtype.itemsize,),
            "typestr": "|u1",
            "data": (self._mailbox_at(0, index), False),
            "version": 3,
        }
        view: Any = type("_Memory", (), {"__cuda_array_interface__": interface})()
        return torch.as_tensor(view, device=self.device).view(self._dtype)

    def deliver(self, index: int, message: Tensor) -> None:
        """Copy ``message`` to the other end's mailbox, on the current stream."""
        self._copy(self._mailbox_at(1, index), message.data_ptr(), message.numel() * message.itemsize)

    def raise_flag(self, index: int, turn: int) -> None:
        """Tell the other end that ``turn`` is over, behind what is on the current stream."""
        source = self._turns.data_ptr() + turn % _TURNS * _FLAG_BYTES
        self._copy(self._memory.addresses[1] + index * _FLAG_BYTES, source, _FLAG_BYTES)

    def wait_for_flag(self, index: int, turn: int) -> None:
        """Let the current stream wait until the other end has told that."""
        address = ctypes.c_uint64(self._memory.addresses[0] + index * _FLAG_BYTES)
        value = ctypes.c_uint32(turn % _TURNS)
        self._call("cuStreamWaitValue32_v2", self._stream(), address, value, ctypes.c_uint(_EQUAL))

    def close(self) -> None:
        """Give the memory back; nothing may be on its way."""
        self._memory.close()

    def _mailbox_at(self, end: int, index: int) -> int:
        begin = self._memory.addresses[end] + _flags_bytes(self.capacity)
        return begin + index * _mailbox_bytes(self._most, self._dtype)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(num_bytes), self._stream())

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._driver, function)(*args)
        assert status == 0, f"{function} failed with CUDA error {status}"


class CopyOutlet:
    """A runner.distributed.pipeline_stages.Outlet."""

    def __init__(self, lane: CopyLane, staged: Tensor) -> None:
        """``staged`` are [capacity, elements of the longest message]."""
        self._lane, self._staged = lane, staged
        self._sent = [torch.cuda.Event() for _ in staged]
        self._turn = 0

    def send(self, message: Tensor) -> None:
        """Behind what is on the current stream; the host waits for nothing."""
        lane = self._lane
        self._turn += 1
        at = self._turn % lane.capacity
        current = torch.cuda.current_stream(lane.device)
        current.wait_event(self._sent[at])
        staged = self._staged[at, : message.numel()]
        staged.copy_(message.reshape(-1))
        lane.side.wait_stream(current)
        with torch.cuda.stream(lane.side):
            if self._turn > lane.capacity:
                lane.wait_for_flag(at, self._turn - lane.capacity)
            lane.deliver(at, staged)
            lane.raise_flag(at, self._turn)
            self._sent[at].record()

    def close(self) -> None:
        self._lane.close()


class CopyInlet:
    """A runner.distributed.pipeline_stages.Inlet."""

    def __init__(self, lane: CopyLane) -> None:
        self._lane = lane
        self._mailboxes = [lane.mailbox(index) for index in range(lane.capacity)]
        self._expected: deque[tuple[int, ...]] = deque()  # shapes
        self._turn = 0

    @property
    def capacity(self) -> int:
        """Messages that may be expected at once."""
        return self._lane.capacity

    def expect(self, *shape: int) -> None:
        """That of the next message."""
        assert len(self._expected) < self.capacity, "a message is expected and no mailbox is free"
        self._expected.append(shape)

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        """The oldest message that is expected, there for later work on the current stream, which may change it.

        When the context ends all work that reads it must have been ordered.
        """
        lane, shape = self._lane, self._expected.popleft()
        self._turn += 1
        at = self._turn % lane.capacity
        lane.wait_for_flag(at, self._turn)
        yield self._mailboxes[at][: math.prod(shape)].view(shape)
        lane.side.wait_stream(torch.cuda.current_stream(lane.device))
        with torch.cuda.stream(lane.side):
            lane.raise_flag(at, self._turn)

    def close(self) -> None:
        self._lane.close()


def _flags_bytes(capacity: int) -> int:
    return -(-capacity * _FLAG_BYTES // _ALIGNMENT) * _ALIGNMENT


def _mailbox_bytes(most: int, dtype: torch.dtype) -> int:
    return -(-most * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
