"""Compile and run a tiny Triton kernel: ``python -m runner.kernels.probe cuda:0``. Fails with the reason."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

_SIZE = 16


@triton.jit
def _double(values_ptr, SIZE: tl.constexpr):
    places = values_ptr + tl.arange(0, SIZE)
    tl.store(places, tl.load(places) * 2)


def main(device: str) -> int:
    values = torch.arange(_SIZE, device=device)
    _double[(1,)](values, SIZE=_SIZE)
    assert values.tolist() == list(range(0, 2 * _SIZE, 2)), "a kernel computes wrong values"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
