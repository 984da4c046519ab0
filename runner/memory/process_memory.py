"""Memory of a GPU that this process holds, whatever other processes on the GPU allocate or free meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_log = logging.getLogger(__name__)

#: Bytes outside of PyTorch's allocator if the driver does not tell: a CUDA context, kernels, workspaces of libraries.
#: A process with a context and cuBLAS held 0.66 GiB on an H100; the rest is for attention kernels, graphs and NCCL.
ASSUMED_OUTSIDE = 2 << 30


def process_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process holds: PyTorch's allocator, CUDA contexts, kernels and graphs.

    NVML tells them per process. It cannot in a container with process ids of its own, for a part of a GPU (MIG) or
    without nvidia-ml-py; then PyTorch's bytes and ``ASSUMED_OUTSIDE`` are returned, and the log says so.
    """
    reserved = torch.cuda.memory_reserved(device)
    driver_bytes = _known_to_driver(device)
    if driver_bytes is not None:
        return max(driver_bytes, reserved)
    _warn_once()
    return reserved + ASSUMED_OUTSIDE


@cache
def _warn_once() -> None:
    _log.warning(
        "the driver does not tell the GPU memory of this process; %d MiB are assumed for CUDA contexts and kernels",
        ASSUMED_OUTSIDE >> 20,
    )


def _known_to_driver(device: torch.device) -> int | None:
    """Return NVML's bytes of this process on a GPU, None if it does not list the process."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        with _nvml(pynvml):
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


@contextmanager
def _nvml(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
