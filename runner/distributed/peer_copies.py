"""Messages between two GPUs of one host through their copy engines: no multiprocessor waits or copies for them.

A kernel that waits for a message (NCCL's) occupies multiprocessors of the step that runs meanwhile. Kernels that count
on all multiprocessors then need a second wave: two stages were 11 % slower so, with NCCL on a single multiprocessor.

    sender                                  receiver
    staging ── copy ──────────────────────► buffer       a ring of K buffers on each side
    number ─── copy ──────────────────────► arrived ──── the stream waits for it (cuStreamWaitValue32)
    read ◄──────────────────────── copy ─── number       after all work that reads the buffer
      └─ the stream waits for it before it copies to the same buffer again
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

from runner.distributed.parallel_state import PeerChannel
from runner.distributed.peer_memory import PeerMemory, map_memory

_NUMBERS = 1024  # messages until numbers repeat; two uses of one buffer are closer than that
_ALIGNMENT = 256  # bytes
_FLAG_BYTES = 4
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class CopyChannel:
    """One end: the receiver has ``capacity`` buffers, each for ``size`` elements of ``dtype``."""

    def __init__(self, memory: PeerMemory, capacity: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._size = size
        self._dtype = dtype
        self._memory = memory  # ours first, then the other end's
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()

    @classmethod
    def open(cls, channel: PeerChannel, capacity: int, size: int, dtype: torch.dtype) -> CopyChannel | None:
        """Open both ends; each end calls it. Return None on both if they are no GPUs with peer access."""
        if channel.device.type != "cuda":
            return None
        buffers = 0 if channel.sends else capacity * _buffer_bytes(size, dtype)
        memory = map_memory(_flags_bytes(capacity) + buffers, 0, lambda mine: [mine, channel.exchange(mine)])
        return None if memory is None else cls(memory, capacity, size, dtype, channel.device)

    def buffer(self, index: int) -> Tensor:
        """Return one of our buffers, [size]; the other end writes to its memory."""
        interface = {
            "shape": (self._size * self._dtype.itemsize,),
            "typestr": "|u1",
            "data": (self._buffer_address(0, index), False),
            "version": 3,
        }
        view: Any = type("_Memory", (), {"__cuda_array_interface__": interface})()
        return torch.as_tensor(view, device=self.device).view(self._dtype)

    def write(self, index: int, message: Tensor) -> None:
        """Copy ``message`` to the other end's buffer, on the current stream."""
        self._copy(self._buffer_address(1, index), message.data_ptr(), message.numel() * message.itemsize)

    def set_flag(self, index: int, number: int) -> None:
        """Set the other end's flag of a buffer to ``number``, behind the work on the current stream."""
        source = self._numbers.data_ptr() + number % _NUMBERS * _FLAG_BYTES
        self._copy(self._memory.addresses[1] + index * _FLAG_BYTES, source, _FLAG_BYTES)

    def wait_flag(self, index: int, number: int) -> None:
        """Make the current stream wait until our flag of a buffer has that ``number``."""
        address = ctypes.c_uint64(self._memory.addresses[0] + index * _FLAG_BYTES)
        value = ctypes.c_uint32(number % _NUMBERS)
        self._call("cuStreamWaitValue32_v2", self._current_stream(), address, value, ctypes.c_uint(_EQUAL))

    def close(self) -> None:
        """Free the memory. No message may be on its way."""
        self._memory.close()

    def _buffer_address(self, end: int, index: int) -> int:
        begin = self._memory.addresses[end] + _flags_bytes(self.capacity)
        return begin + index * _buffer_bytes(self._size, self._dtype)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(num_bytes), self._current_stream())

    def _current_stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._driver, function)(*args)
        assert status == 0, f"{function} failed with CUDA error {status}"


class CopySender:
    """A runner.distributed.pipeline_stages.TensorSender."""

    def __init__(self, channel: CopyChannel, staging: Tensor) -> None:
        """``staging`` is [capacity, elements of the longest message]."""
        self._channel = channel
        self._staging = staging
        self._sent = [torch.cuda.Event() for _ in staging]
        self._number = 0

    def send(self, message: Tensor) -> None:
        channel = self._channel
        self._number += 1
        at = self._number % channel.capacity
        current = torch.cuda.current_stream(channel.device)
        current.wait_event(self._sent[at])
        staged = self._staging[at, : message.numel()]
        staged.copy_(message.reshape(-1))
        channel.stream.wait_stream(current)
        with torch.cuda.stream(channel.stream):
            if self._number > channel.capacity:
                channel.wait_flag(at, self._number - channel.capacity)
            channel.write(at, staged)
            channel.set_flag(at, self._number)
            self._sent[at].record()

    def close(self) -> None:
        self._channel.close()


class CopyReceiver:
    """A runner.distributed.pipeline_stages.TensorReceiver."""

    def __init__(self, channel: CopyChannel) -> None:
        self._channel = channel
        self._buffers = [channel.buffer(index) for index in range(channel.capacity)]
        self._expected: deque[tuple[int, ...]] = deque()  # shapes
        self._number = 0

    @property
    def capacity(self) -> int:
        return self._channel.capacity

    def expect(self, *shape: int) -> None:
        assert len(self._expected) < self.capacity, "a message is expected and no buffer is free"
        self._expected.append(shape)

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        channel = self._channel
        shape = self._expected.popleft()
        self._number += 1
        at = self._number % channel.capacity
        channel.wait_flag(at, self._number)
        yield self._buffers[at][: math.prod(shape)].view(shape)
        channel.stream.wait_stream(torch.cuda.current_stream(channel.device))
        with torch.cuda.stream(channel.stream):
            channel.set_flag(at, self._number)

    def close(self) -> None:
        self._channel.close()


def _flags_bytes(capacity: int) -> int:
    return -(-capacity * _FLAG_BYTES // _ALIGNMENT) * _ALIGNMENT


def _buffer_bytes(size: int, dtype: torch.dtype) -> int:
    return -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
