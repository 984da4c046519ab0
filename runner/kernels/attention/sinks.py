"""Attention sinks in Triton: a learned score for each query head, which takes part in the softmax and has no value."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def sinks_of_rows(sinks, member, GROUP: tl.constexpr):
    """Return the first top (log2) and total of a softmax whose rows are the ``member``-th heads behind ``sinks``."""
    top = tl.load(sinks + member, mask=member < GROUP, other=0.0).to(tl.float32) * _LOG2_E
    return top, tl.full(member.shape, 1.0, tl.float32)
