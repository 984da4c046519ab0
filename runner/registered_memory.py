"""Device memory that is registered for transfers."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.errors import CapacityError

_MEMORY_PAGE = 4096  # bytes; registration pins whole memory pages


def registrable_zeros(num_bytes: int, device: torch.device, purpose: str) -> Tensor:
    """Return zeroed memory [num_bytes] uint8 that begins with a memory page. Raises CapacityError."""
    try:
        memory = torch.zeros(num_bytes + _MEMORY_PAGE, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise CapacityError(
            f"{device} has no longer {num_bytes / 2**30:.2f} GiB for the {purpose}: another process took memory while "
            "this node started; lower --gpu-memory-utilization of both, or set --kv-cache-memory"
        ) from exc
    begin = -memory.data_ptr() % _MEMORY_PAGE
    return memory[begin : begin + num_bytes]
