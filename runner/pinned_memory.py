"""Host memory for copies to and from a GPU that the host does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SIZES = range(9, 23)  # powers of two, in bytes: from the allocator's smallest to 4 MiB
_LARGEST = 1 << _SIZES[-1]


def reserve_pinned_memory(count: int) -> None:
    """Allocate ``count`` blocks of each usual size and leave them to torch's allocator.

    Without, a step that needs one more block than any before it would wait until the device is idle: 60 ms were
    measured beside prompts. The allocator keeps what is freed, by powers of two.
    """
    blocks = [torch.empty(1 << size, dtype=torch.uint8, pin_memory=True) for size in _SIZES for _ in range(count)]
    blocks.clear()


def copied(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy of an array on a device. The host does not wait; it may change the array at once."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    return tensor.pin_memory().to(device, non_blocking=True)


def copied_bytes(data: bytes, device: torch.device) -> Tensor:
    """Return a copy of bytes on a device, uint8. The host does not wait.

    They take several blocks of the largest usual size, so that those of other sizes reuse the blocks.
    """
    whole = torch.empty(len(data), dtype=torch.uint8, device=device)
    for part in whole.split(_LARGEST):
        start = part.storage_offset()
        block = torch.empty(len(part), dtype=torch.uint8, pin_memory=device.type == "cuda")
        block.numpy()[:] = np.frombuffer(data, np.uint8, len(part), start)
        part.copy_(block, non_blocking=True)
    return whole
