"""Attention among patches: equal in parts and as a whole; on a GPU its memory grows with the patches, not their square.

python -m pytest -m gpu tests/runner/test_vision_attention.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.models.vision.attention import attend, attend_in_parts

HEADS = 4


def heads_of(patches: int, head_dim: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k and v; v lies amid other values, as behind the tower's product."""
    generator = torch.Generator(device).manual_seed(1)
    mixed = torch.randn(patches, 3, HEADS, head_dim, generator=generator, device=device, dtype=dtype)
    q, k, v = mixed.unbind(1)
    return [q.contiguous(), k.contiguous(), v]


@pytest.mark.parametrize("most_scores", [1, 900, 1 << 20])
def test_parts_are_the_whole(most_scores: int) -> None:
    q, k, v = heads_of(75, 12)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 12**0.5
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(attend(q, k, v), expected)
    torch.testing.assert_close(attend_in_parts(q, k, v, most_scores), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype", "patches"),
    [
        (72, torch.bfloat16, 65_536),  # Qwen's towers
        (80, torch.bfloat16, 65_536),
        (76, torch.bfloat16, 16_384),  # no multiple of 8
        (300, torch.bfloat16, 16_384),  # no kernel but the one with all scores
        (72, torch.float32, 16_384),
        (320, torch.float32, 16_384),
    ],
)
def test_memory_does_not_grow_with_the_square(head_dim: int, dtype: torch.dtype, patches: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v = heads_of(patches, head_dim, "cuda", dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = attend(q, k, v)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 8 * q.nbytes + (2 << 30)
    few = slice(0, 64)
    wide_q, wide_k, wide_v = (x.double().transpose(0, 1) for x in (q[few], k, v))
    exact = F.scaled_dot_product_attention(wide_q, wide_k, wide_v).transpose(0, 1)
    torch.testing.assert_close(result[few].double(), exact, rtol=0.02, atol=5e-4)


@pytest.mark.gpu
def test_qwen_s_heads_take_flash_attention() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v = heads_of(4096, 72, "cuda", torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(q, k, v)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention" in names, sorted(names)
