"""Kernels that start while the one before them still runs (CUDA's programmatic dependent launch, Hopper and later).

A decode step of a small model is hundreds of kernels of a few microseconds, and between any two of them the GPU idles
while one drains and the next is launched. A chained kernel is launched early, does what does not depend on others, and
waits. Every program of it must wait, also one that returns early: whoever comes next relies on the whole chain.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

_HOPPER = (9, 0)


@triton.jit
def wait_for_predecessor(CHAINED: tl.constexpr):
    """Until here a kernel may only read what no kernel writes (weights). From here its successor may be launched."""
    if CHAINED:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def chained(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that calls ``wait_for_predecessor`` and whose tensors have as many rows as this one.

    Only steps of a single token are chains: with more, the products are cuBLAS's, which neither wait nor let others
    start, and programs that wait would only be in the way (steps of 128 and 256 tokens were 3 to 13 % slower with it).
    """
    if tensor.shape[0] == 1 and _can_chain(tensor.device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


@functools.cache
def _can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
