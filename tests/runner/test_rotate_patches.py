"""The rotation of patches in Triton, in the interpreter: it is that of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.kernels.attention.rotate_patches import rotate, rotate_into
from runner.models.vision.attention import Rotary

PATCHES = 21
HEADS = 3
HEAD_DIM = 72


def heads_and_angles(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Rotary]:
    """Return q, k and v as they lie behind a product of all three."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(PATCHES, 3, HEADS, HEAD_DIM, generator=generator).to(dtype)
    q, k, v = mixed.unbind(1)
    return (q, k, v), Rotary.of(torch.rand(PATCHES, HEAD_DIM // 2, generator=generator) * 6.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_in_place(dtype: torch.dtype) -> None:
    (q, k, v), rotary = heads_and_angles(dtype)
    expected = rotary(q), rotary(k), v.clone()
    rotate(q, k, rotary.cos[:, 0], rotary.sin[:, 0])
    for actual, exact in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(actual, exact)


def test_rotation_into_padded_heads() -> None:
    (q, k, v), rotary = heads_and_angles(torch.float32)
    targets = torch.zeros(3, PATCHES, HEADS, 128)
    rotate_into((q, k, v), targets, rotary.cos[:, 0], rotary.sin[:, 0])
    for actual, exact in zip(targets.unbind(), (rotary(q), rotary(k), v), strict=True):
        torch.testing.assert_close(actual[..., :HEAD_DIM], exact)
    assert not targets[..., HEAD_DIM:].any()
