"""The Triton kernels of patches, in the interpreter: attention and rotation are those of plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.models.vision.attention import Rotary


def heads_of(patches: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as they lie behind a product of all three."""
    generator = torch.Generator().manual_seed(patches)
    q, k, v = torch.randn(patches, 3, heads, head_dim, generator=generator).to(dtype).unbind(1)
    return q, k, v


@pytest.mark.parametrize(
    ("patches", "head_dim"), [(1, 72), (64, 64), (65, 72), (130, 80), (37, 24), (40, 96)], ids=lambda value: str(value)
)
def test_patches_attend_to_all(patches: int, head_dim: int) -> None:
    from runner.kernels.attention.patch_attention import attend

    q, k, v = heads_of(patches, 2, head_dim, torch.bfloat16)
    wide = (x.double().transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*wide).transpose(0, 1)
    result = attend(q, k, v, BLOCK_Q=32, BLOCK_K=32)
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_is_that_of_torch(dtype: torch.dtype) -> None:
    from runner.kernels.attention.patch_attention import rotate

    q, k, v = heads_of(21, 3, 72, dtype)
    generator = torch.Generator().manual_seed(1)
    rotary = Rotary.of(torch.rand(21, 36, generator=generator) * 6.0)
    expected = rotary(q), rotary(k), v.clone()
    rotate(q, k, rotary.cos[:, 0], rotary.sin[:, 0])
    for actual, exact in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(actual, exact)
