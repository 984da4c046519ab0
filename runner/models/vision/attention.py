"""Full attention among the patches of an image, whose memory never grows with the square of the patches.

On a GPU, FlashAttention and the memory-efficient kernel of PyTorch hold no scores. FlashAttention takes bfloat16 and
float16 with heads of up to 256 values; Qwen's towers have 72, which it computes as 96. The memory-efficient kernel
takes float32. Whatever both lack would take products with all scores: 256 GiB for 16 heads and 65,536 patches in
float32. So the queries are divided there. cuDNN's kernel is left out: PyTorch prefers it on Hopper, but it is built for
each number of patches, and images have many sizes: 60 ms on an H200. Where nodes attend to text with FlashInfer, it
attends to patches, too (flashinfer_patches.py).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_MOST_SCORES = 1 << 26  # 256 MiB in float32


class Rotary(NamedTuple):
    cos: Tensor  # [patches, 1, head_dim] float32; both halves of a head are alike
    sin: Tensor

    @classmethod
    def of(cls, angles: Tensor) -> Rotary:
        """``angles``: [patches, head_dim / 2] float32."""
        angles = torch.cat((angles, angles), dim=1)[:, None]
        return cls(angles.cos(), angles.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate heads [patches, heads, head_dim] in float32."""
        wide = x.float()
        low, high = wide.chunk(2, dim=-1)
        return (wide * self.cos + torch.cat((-high, low), dim=-1) * self.sin).to(x.dtype)


class PatchAttention:
    """The attention of a tower."""

    def __init__(self, use_triton: bool = False) -> None:
        """``use_triton``: the device's Triton kernels work."""
        self._use_triton = use_triton

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        """Rotate queries and keys, perhaps in place, and let all patches attend to each other.

        q, k, v: [patches, heads, head_dim] with the same strides; the result [patches, heads · head_dim].
        """
        if self._use_triton and q.device.type == "cuda":
            from runner.kernels.attention.rotate_patches import rotate

            rotate(q, k, rotary.cos[:, 0], rotary.sin[:, 0])
        else:
            q = rotary(q)
            k = rotary(k)
        return attend(q, k, v).flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let all patches attend to each other: [patches, heads, head_dim] each; the result, too."""
    if q.device.type != "cuda":
        return _attend(q, k, v)  # PyTorch's kernel for CPUs takes every size
    if not _is_fused(q.device, q.dtype, q.shape[-1]):
        return attend_in_parts(q, k, v)
    with sdpa_kernel(_FUSED):
        return _attend(q, k, v)


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, most_scores: int = _MOST_SCORES) -> Tensor:
    """Return ``attend``, of as many queries at a time as have ``most_scores`` scores, at least one."""
    rows = max(1, most_scores // (len(k) * k.shape[1]))
    return torch.cat([_attend(part, k, v) for part in q.split(rows)])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


@cache
def _is_fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a GPU has a kernel that holds no scores, for any number of patches."""
    heads = torch.empty(1, 1, 8, head_dim, dtype=dtype, device=device)
    params = torch.backends.cuda.SDPAParams(heads, heads, heads, None, 0.0, False, False)
    flash = torch.backends.cuda.can_use_flash_attention(params)
    return bool(flash or torch.backends.cuda.can_use_efficient_attention(params))
