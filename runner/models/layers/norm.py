"""RMS norm (arXiv 1910.07467): x / rms(x) * weight over the last dimension, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x [..., size] normed and scaled by a weight that broadcasts against it; eps [] float32, on the same device.

    ``F.rms_norm`` has no CPU kernel, it becomes seven operations. These five take half of its time, for one token (13
    instead of 23 µs for 512 values) as for a thousand (0.4 instead of 0.85 ms).
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)
