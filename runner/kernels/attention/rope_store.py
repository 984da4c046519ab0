"""Norm and rotate query and key heads, and store keys and values, in one pass over the projected heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kv.layout import UNSCALED, KVScales
from runner.batch import HeadNorms, RotaryCosSin
from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor
from runner.kernels.products.fp8 import to_cache

_BLOCK = 1024  # values per program, in whole heads


@triton.jit
def _store_rotated(
    source,  # heads of this token, HEAD_DIM apart
    first_head,
    num_heads,
    cos,
    sin,
    norm_weight,
    eps,
    target,  # place of the first head; the others are target_stride apart
    target_stride,
    inverse_scale,  # 1 / scale of an FP8 target
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norm and rotate up to BLOCK_HEADS heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = (first_head + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    mask = heads < num_heads
    left = tl.load(source + heads * HEAD_DIM + columns, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + heads * HEAD_DIM + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        left = left * scale * tl.load(norm_weight + columns).to(tl.float32)
        right = right * scale * tl.load(norm_weight + HALF + columns).to(tl.float32)
    cosine = tl.load(cos + columns)
    sine = tl.load(sin + columns)
    at = target + heads * target_stride + columns
    tl.store(at, to_cache(left * cosine - right * sine, inverse_scale, target.dtype.element_ty), mask=mask)
    tl.store(at + HALF, to_cache(right * cosine + left * sine, inverse_scale, target.dtype.element_ty), mask=mask)


@triton.jit
def _store_plain(
    source,
    first_head,
    num_heads,
    target,
    target_stride,
    inverse_scale,  # 1 / scale of an FP8 target
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Copy up to BLOCK_HEADS heads."""
    heads = (first_head + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    mask = heads < num_heads
    values = tl.load(source + heads * HEAD_DIM + columns, mask=mask, other=0.0)
    values = to_cache(values, inverse_scale, target.dtype.element_ty)
    tl.store(target + heads * target_stride + columns, values, mask=mask)


@triton.jit
def _rope_store_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM], rows qkv_stride apart
    qkv_stride,
    cos,  # [tokens, HEAD_DIM / 2] float32, rows rotary_stride apart
    sin,
    rotary_stride,
    slots,  # [tokens] int64
    q_weight,  # [HEAD_DIM], read if HAS_NORMS
    k_weight,
    eps,
    q,  # out [tokens, HEADS, HEAD_DIM]
    cache,  # out [pages, KV_HEADS, 2 (K, V), PAGE_SIZE, HEAD_DIM], the last two dense
    page_stride,
    head_stride,
    v_stride,  # from K to V
    k_inverse,  # 1 / scale of an FP8 cache
    v_inverse,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, blocks of query heads, then of key heads, then of value heads)."""
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    queries = qkv + token * qkv_stride
    keys = queries + HEADS * HEAD_DIM
    values = keys + KV_HEADS * HEAD_DIM
    wait_for_predecessor(PDL)
    cos += token * rotary_stride
    sin += token * rotary_stride
    slot = tl.load(slots + token)
    num_stored = tl.where(slot >= 0, KV_HEADS, 0)
    slot = tl.maximum(slot, 0)
    k = cache + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * HEAD_DIM
    v = k + v_stride
    if block < Q_BLOCKS:
        _store_rotated(queries, block * BLOCK_HEADS, HEADS, cos, sin, q_weight, eps,
                      q + token * HEADS * HEAD_DIM, HEAD_DIM, 1.0, HEAD_DIM, BLOCK_HEADS, HAS_NORMS)  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        first = (block - Q_BLOCKS) * BLOCK_HEADS
        _store_rotated(keys, first, num_stored, cos, sin, k_weight, eps,
                      k, head_stride, k_inverse, HEAD_DIM, BLOCK_HEADS, HAS_NORMS)  # fmt: skip
    else:
        first = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_HEADS
        _store_plain(values, first, num_stored, v, head_stride, v_inverse, HEAD_DIM, BLOCK_HEADS)


def rope_store(
    qkv: Tensor,
    num_heads: int,
    rotary: RotaryCosSin,
    norms: HeadNorms | None,
    slots: Tensor,
    cache: Tensor,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Return query heads [tokens, num_heads, head_dim], normed and rotated; store such keys, and values, in the cache.

    qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim], with rows at any stride; head_dim a power of two, at least
    16. slots [tokens] int64: page * page_size + offset, -1 to store nothing. cache: a layer's view [pages,
    num_kv_heads, 2, page_size, head_dim].
    ``scales`` belong to an FP8 cache.
    """
    _, kv_heads, _, page_size, head_dim = cache.shape
    tokens = qkv.shape[0]
    assert qkv.stride(1) == 1
    assert cache.stride()[3:] == (head_dim, 1)
    q = qkv.new_empty(tokens, num_heads, head_dim)
    # An unused weight must still be a tensor.
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else (norms.q_weight, norms.k_weight, norms.eps)
    block_heads = min(max(_BLOCK // head_dim, 1), triton.next_power_of_2(num_heads))
    blocks = triton.cdiv(num_heads, block_heads) + 2 * triton.cdiv(kv_heads, block_heads)
    _rope_store_kernel[(tokens, blocks)](
        qkv,
        qkv.stride(0),
        rotary.cos,
        rotary.sin,
        rotary.cos.stride(0),
        slots,
        q_weight,
        k_weight,
        eps,
        q,
        cache,
        *cache.stride()[:3],
        1.0 / scales.k,
        1.0 / scales.v,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=block_heads,
        HAS_NORMS=norms is not None,
        num_warps=4,
        **pdl_options(q),
    )
    return q
