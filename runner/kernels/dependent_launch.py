"""Programmatic dependent launch (CUDA, Hopper and later): kernels that start while the one before them still runs.

A decode step of a small model is hundreds of kernels of a few microseconds. Between two of them the GPU idles while one
drains and the next is launched. A kernel with dependent launch starts early, does the work that does not depend on
others, and waits. All its programs must wait, also those that return early: the next kernel relies on the whole chain.
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
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait for the kernel before. Earlier code may only read what no kernel writes (weights).

    From here on the next kernel may be launched.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def pdl_options(tensor: Tensor, most_rows: int = 1) -> dict[str, Any]:
    """Return the launch options of a kernel that calls ``wait_for_predecessor`` and has ``tensor``'s number of rows.

    Only steps of a single token use dependent launch. With more tokens the products are cuBLAS's, which neither wait
    nor launch early, and waiting programs would be in the way (steps of 128 and 256 tokens were 3 to 13 % slower).
    """
    if 1 <= tensor.shape[0] <= most_rows and _has_pdl(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
