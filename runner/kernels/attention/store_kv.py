"""Store rotated keys, and values, in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kv.layout import UNSCALED, KVScales
from runner.kernels.products.fp8 import to_cache

_BLOCK = 1024  # values per program, in whole heads


@triton.jit
def _store_kv_kernel(
    k,  # [tokens, KV_HEADS, HEAD_DIM], the last dense
    k_token_stride,
    k_head_stride,
    v,  # [tokens, KV_HEADS, HEAD_DIM], the last dense
    v_token_stride,
    v_head_stride,
    slots,  # [tokens] int64
    cache,  # out [pages, KV_HEADS, 2 (K, V), PAGE_SIZE, HEAD_DIM], the last two dense
    page_stride,
    head_stride,
    v_stride,  # from K to V
    k_inverse,  # 1 / scale of an FP8 cache
    v_inverse,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    mask = heads < tl.where(slot >= 0, KV_HEADS, 0)
    slot = tl.maximum(slot, 0)
    target = cache + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * HEAD_DIM + heads * head_stride + columns
    keys = tl.load(k + token * k_token_stride + heads * k_head_stride + columns, mask=mask, other=0.0)
    values = tl.load(v + token * v_token_stride + heads * v_head_stride + columns, mask=mask, other=0.0)
    tl.store(target, to_cache(keys, k_inverse, cache.dtype.element_ty), mask=mask)
    tl.store(target + v_stride, to_cache(values, v_inverse, cache.dtype.element_ty), mask=mask)


def store_kv(k: Tensor, v: Tensor, slots: Tensor, cache: Tensor, scales: KVScales = UNSCALED) -> None:
    """Store k and v [tokens, num_kv_heads, head_dim]; slots [tokens] int64, -1 to store nothing.

    Tokens and heads may lie at any stride. cache: a layer's view [pages, num_kv_heads, 2, page_size, head_dim];
    head_dim a power of two. ``scales`` belong to an FP8 cache.
    """
    _, kv_heads, _, page_size, head_dim = cache.shape
    assert k.stride(2) == v.stride(2) == 1
    assert cache.stride()[3:] == (head_dim, 1)
    block_heads = min(max(_BLOCK // head_dim, 1), triton.next_power_of_2(kv_heads))
    _store_kv_kernel[(k.shape[0], triton.cdiv(kv_heads, block_heads))](
        k,
        *k.stride()[:2],
        v,
        *v.stride()[:2],
        slots,
        cache,
        *cache.stride()[:3],
        1.0 / scales.k,
        1.0 / scales.v,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=block_heads,
        num_warps=4,
    )
