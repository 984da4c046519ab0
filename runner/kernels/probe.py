"""Compile and run a tiny Triton kernel: ``python -m runner.kernels.probe cuda:0``. Fails with the reason."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import triton
import triton.language as tl

_SIZE = 16


@triton.jit
def _double(values_ptr, SIZE: tl.constexpr):
    places = values_ptr + tl.arange(0, SIZE)
    tl.store(places, tl.load(places) * 2)


def main(device: str) -> int:
    """Run a kernel with Triton's cache, which may hold libraries of another host, then compile one anew.

    Cached kernels of an earlier run hide a missing compiler.
    """
    _run_kernel(torch.arange(_SIZE, device=device))
    cache = triton.knobs.cache.dir
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pdserve-probe-", dir=cache) as folder:
        triton.knobs.cache.dir = folder
        _run_kernel(torch.arange(_SIZE, device=device, dtype=torch.float32))
    return 0


def _run_kernel(values: torch.Tensor) -> None:
    """Raise if the kernel fails. Triton compiles it once per dtype."""
    _double[(1,)](values, SIZE=_SIZE)
    assert values.tolist() == list(range(0, 2 * _SIZE, 2)), "a kernel computes wrong values"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
