"""Processors and shared memory of a GPU, from which kernels choose tiles. A CPU stands for the interpreter."""

from __future__ import annotations

import functools

import torch
import triton

_INTERPRETED_PROCESSORS = 4
_INTERPRETED_SHARED_MEMORY = 160 << 10


def processors_of(device: torch.device) -> int:
    """Return the number of processors (SMs)."""
    return _properties(_index(device))["multiprocessor_count"] if device.type == "cuda" else _INTERPRETED_PROCESSORS


def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    return _properties(_index(device))["max_shared_mem"] if device.type == "cuda" else _INTERPRETED_SHARED_MEMORY


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _properties(index: int) -> dict[str, int]:
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties
