"""All-reduce of a few rows over the tensor shards of a stage, fused with the residual sum and RMS norm that follow.

For GPUs that can write to each other's memory. NCCL suits many bytes; a decode step sums a few kilobytes, twice per
layer. Here every rank writes its part to a mailbox on each peer, together with a flag that counts the sums. It then
adds the parts in its own mailbox. Values and flag are one word, so one wait covers both (NCCL's protocol LL does the
same):

    rank 0  ──► mailbox on 1, 2, 3         packet = flag << 32 | two values of 16 bits
    rank 1  ──► mailbox on 0, 2, 3
       …                                   sum in the order of ranks: the same bits everywhere

Each row has its own program, mailbox and flag. Two mailboxes alternate: before a rank writes the next but one packet,
it has received the peer's next one, which the peer sent after it had read this one.

Rows are int32 words of two values. The plain form is ``torch.distributed.all_reduce``, followed by ``norm.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor

_PACKET_BYTES = 8
_MAILBOXES = 2
_MOST_BYTES = 4 << 20  # most that a rank sends; beyond, it matters that packets are twice as long as their values
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """Return the two values of each word, float32."""
    first = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    second = ((words >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _pack(first, second, DTYPE: tl.constexpr):
    low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["max_rows"])
def _sum_and_norm_kernel(
    x,  # [rows, WORDS]
    residual,  # [rows, WORDS]; the sum is added to it
    weight,  # [WORDS], of the norm
    out,  # [rows, WORDS]
    flags,  # [max_rows] int32: number of sums of each row
    mailboxes,  # [WORLD] int64: addresses of [_MAILBOXES, WORLD, max_rows, WORDS] packets on each rank
    max_rows,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WORDS
    weights = tl.load(weight + column, mask=mask, other=0)
    wait_for_predecessor(PDL)
    flag = tl.load(flags + row) + 1
    mine = tl.load(x + row * WORDS + column, mask=mask, other=0)
    packets = (flag.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    mailbox = (flag & 1).to(tl.int64) * WORLD
    for peer in tl.static_range(WORLD):
        theirs = tl.load(mailboxes + peer).to(tl.pointer_type(tl.int64))
        tl.store(theirs + ((mailbox + RANK) * max_rows + row) * WORDS + column, packets, mask=mask)

    source = tl.arange(0, WORLD)[:, None]
    ours = tl.load(mailboxes + RANK).to(tl.pointer_type(tl.int64))
    expected = ours + ((mailbox + source) * max_rows + row) * WORDS + column[None, :]
    arrived = tl.load(expected, mask=mask[None, :], other=flag.to(tl.int64) << 32, volatile=True)
    while tl.max(tl.max(((arrived >> 32).to(tl.int32) != flag).to(tl.int32), axis=1), axis=0) != 0:
        arrived = tl.load(expected, mask=mask[None, :], other=flag.to(tl.int64) << 32, volatile=True)
    at = row * WORDS + column
    firsts, seconds = _unpack(arrived.to(tl.int32), DTYPE)
    first, second = _unpack(tl.load(residual + at, mask=mask, other=0), DTYPE)
    total = _pack(first + tl.sum(firsts, axis=0), second + tl.sum(seconds, axis=0), DTYPE)
    tl.store(residual + at, total, mask=mask)
    first, second = _unpack(total, DTYPE)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / (2 * WORDS) + eps)
    first_weight, second_weight = _unpack(weights, DTYPE)
    tl.store(out + at, _pack(first * scale * first_weight, second * scale * second_weight, DTYPE), mask=mask)
    tl.debug_barrier()  # every thread has read the flag
    tl.store(flags + row, flag)


def most_rows(world: int, size: int) -> int:
    """Return the most rows of ``size`` values for which the kernel is faster than NCCL.

    docs/numbers.md#kernels has the times of both.
    """
    return max(1, _MOST_BYTES // ((world - 1) * size // 2 * _PACKET_BYTES))


def mailbox_bytes(world: int, max_rows: int, size: int) -> int:
    """Return the bytes of zeroed memory that ``SumAndNorm`` needs on every rank for rows of ``size`` values."""
    return _MAILBOXES * world * max_rows * (size // 2) * _PACKET_BYTES


class SumAndNorm:
    """Sum rows over ranks. All ranks must call it in the same order, with as many rows."""

    def __init__(self, mailboxes: list[int], rank: int, max_rows: int, size: int, device: torch.device) -> None:
        """``mailboxes[r]`` is the address, in this process, of ``mailbox_bytes`` of memory on rank r."""
        self._rank = rank
        self._world = len(mailboxes)
        self._max_rows = max_rows
        self._size = size
        self._mailboxes = torch.tensor(mailboxes, dtype=torch.int64, device=device)
        self._flags = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel supports x [rows, size]."""
        return x.shape[0] <= self._max_rows and x.shape[1] == self._size and x.dtype in _DTYPES

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' x [rows, size] to ``residual`` in place; return its RMS norm * weight [size]."""
        assert self.takes(x)
        assert x.is_contiguous()
        assert residual.is_contiguous()
        out = torch.empty_like(x)
        words = self._size // 2
        block = triton.next_power_of_2(words)
        _sum_and_norm_kernel[(x.shape[0],)](
            x.view(torch.int32),
            residual.view(torch.int32),
            weight.view(torch.int32),
            out.view(torch.int32),
            self._flags,
            self._mailboxes,
            self._max_rows,
            eps,
            RANK=self._rank,
            WORLD=self._world,
            WORDS=words,
            BLOCK=block,
            DTYPE=_DTYPES[x.dtype],
            num_warps=min(max(block // 64, 1), 16),
            **pdl_options(out),
        )
        return out
