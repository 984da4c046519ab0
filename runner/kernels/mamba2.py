"""The state space of Mamba2 as Triton kernels. ``mamba2_reference.py`` has the formulas.

``gated_delta.convolve`` makes the inputs. ``state_space`` computes token after token: the state stays in registers, so
a single token costs one read and one write of it. ``chunk_state_space`` goes over a prompt in chunks of 64 tokens, of
which four small products remain: C Bᵀ, the output by tokens of the chunk and by the state, and the new state.

Rows without tokens, and with slot -1, change no state; the output of such tokens is unspecified. Rows with drafts leave
their states as they are, as in ``gated_delta.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Mamba2Weights

_RULE_TILES = 8, 1  # rows of a state in a program, warps
_CHUNK = 64  # tokens
_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TILE = 8192  # values of a state that a program has in registers


@triton.jit
def _steps(dt, dt_stride, token, head, a_log, dt_bias, least, most):
    """Return the time steps and log decays of tokens of a head, in float32."""
    value = tl.load(dt + token * dt_stride + head).to(tl.float32) + dt_bias
    step = tl.where(value > 20.0, value, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))))
    step = tl.minimum(tl.maximum(step, least), most)
    return step, -tl.exp(a_log) * step


@triton.jit
def _state_space_kernel(
    q,  # [tokens, KEY_HEADS, KEY_DIM]: C
    k,  # [tokens, KEY_HEADS, KEY_DIM]: B
    v,  # [tokens, VALUE_HEADS, VALUE_DIM]: x
    dt,  # [tokens, VALUE_HEADS], rows dt_stride apart
    dt_stride,
    a_log,  # [VALUE_HEADS] float32, as dt_bias and skip
    dt_bias,
    skip,
    least,  # limits of time steps
    most,
    states,  # [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM] float32, slots state_stride apart
    state_stride,
    slots,  # [rows] int32
    query_starts,  # [rows + 1] int32
    ends,  # [rows] int32: behind the last token of each row
    snapshots,  # [rows, 2] int32, read if SNAPSHOTS
    drafted,  # [rows] int32: 1 if the state stays as it is, read if HAS_DRAFTS
    out,  # out [tokens, VALUE_HEADS, VALUE_DIM], written if HAS_OUT
    most_tokens,  # tokens of a row that is computed
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_OUT: tl.constexpr,
):
    """Grid (value heads, blocks of a value, rows)."""
    head = tl.program_id(0)
    row = tl.program_id(2)
    begin = tl.load(query_starts + row)
    end = tl.load(ends + row)
    slot = tl.load(slots + row)
    if (end > begin) & (end - begin <= most_tokens) & (slot >= 0):
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        columns = tl.arange(0, BLOCK_KEY)
        values = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
        has_key = columns < KEY_DIM
        has_value = values < VALUE_DIM
        in_slot = (head * VALUE_DIM + values)[:, None] * KEY_DIM + columns[None, :]
        at_state = states + slot.to(tl.int64) * state_stride + in_slot
        in_state = has_value[:, None] & has_key[None, :]
        state = tl.load(at_state, mask=in_state, other=0.0)
        log_a = tl.load(a_log + head)
        bias = tl.load(dt_bias + head)
        through = tl.load(skip + head)
        for number in range(end - begin):
            token = begin.to(tl.int64) + number
            at_key = (token * KEY_HEADS + key_head) * KEY_DIM + columns
            at_value = (token * VALUE_HEADS + head) * VALUE_DIM + values
            key = tl.load(k + at_key, mask=has_key, other=0.0).to(tl.float32)
            value = tl.load(v + at_value, mask=has_value, other=0.0).to(tl.float32)
            step, log_decay = _steps(dt, dt_stride, token, head, log_a, bias, least, most)
            state = state * tl.exp(log_decay) + (value * step)[:, None] * key[None, :]
            if HAS_OUT:
                query = tl.load(q + at_key, mask=has_key, other=0.0).to(tl.float32)
                output = tl.sum(state * query[None, :], axis=1) + value * through
                tl.store(out + at_value, output.to(out.dtype.element_ty), mask=has_value)
            if SNAPSHOTS:
                kept = tl.load(snapshots + 2 * row + 1)
                if (kept >= 0) & (tl.load(snapshots + 2 * row) == number + 1):
                    tl.store(states + kept.to(tl.int64) * state_stride + in_slot, state, mask=in_state)
        stays = 0
        if HAS_DRAFTS:
            stays = tl.load(drafted + row)
        if stays == 0:
            tl.store(at_state, state, mask=in_state)


@triton.jit
def _chunk_kernel(
    q,
    k,
    v,
    dt,
    dt_stride,
    a_log,
    dt_bias,
    skip,
    least,
    most,
    states,
    state_stride,
    slots,
    query_starts,
    snapshots,  # [rows, 2] int32: tokens, slot
    long_rows,  # [long rows, 2] int32: the row first
    out,  # out [tokens, VALUE_HEADS, VALUE_DIM]
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,  # dtype of products
    PRECISION: tl.constexpr,  # input precision of float32 products
):
    """Grid (blocks of a value, value heads, long rows)."""
    head = tl.program_id(1)
    row = tl.load(long_rows + 2 * tl.program_id(2))
    begin = tl.load(query_starts + row)
    end = tl.load(query_starts + row + 1)
    slot = tl.load(slots + row)
    if slot >= 0:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        within = tl.arange(0, CHUNK)
        keys = tl.arange(0, BLOCK_KEY)
        values = tl.program_id(0) * TILE_VALUES + tl.arange(0, TILE_VALUES)
        has_value = values < VALUE_DIM
        in_slot = (head * VALUE_DIM + values)[None, :] * KEY_DIM + keys[:, None]
        in_state = (keys < KEY_DIM)[:, None] & has_value[None, :]
        state = tl.load(states + slot.to(tl.int64) * state_stride + in_slot, mask=in_state, other=0.0)  # [keys, values]
        log_a = tl.load(a_log + head)
        bias = tl.load(dt_bias + head)
        through = tl.load(skip + head)
        seen = within[:, None] >= within[None, :]
        kept = tl.load(snapshots + 2 * row + 1)
        # With a snapshot, the row is two parts; else the second one has no tokens.
        middle = tl.where(kept >= 0, begin + tl.load(snapshots + 2 * row), end)
        for part in range(2):
            for number in range(tl.cdiv(middle - begin, CHUNK)):
                start = begin + number * CHUNK
                token_mask = within < middle - start
                tokens = start.to(tl.int64) + tl.where(token_mask, within, 0)
                at_key = (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + keys[None, :]
                in_key = token_mask[:, None] & (keys < KEY_DIM)[None, :]
                at_value = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + values[None, :]
                in_value = token_mask[:, None] & has_value[None, :]
                query = tl.load(q + at_key, mask=in_key, other=0.0).to(DOT)
                key = tl.load(k + at_key, mask=in_key, other=0.0).to(DOT)
                value = tl.load(v + at_value, mask=in_value, other=0.0)
                step, log_decay = _steps(dt, dt_stride, tokens, head, log_a, bias, least, most)
                step = tl.where(token_mask, step, 0.0)
                total = tl.cumsum(tl.where(token_mask, log_decay, 0.0), axis=0)
                last = tl.sum(tl.where(token_mask, log_decay, 0.0), axis=0)
                decays = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * step[None, :]
                shares = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                shares = tl.where(seen, shares * decays, 0.0)
                result = tl.dot(query, state.to(DOT), input_precision=PRECISION) * tl.exp(total)[:, None]
                result += tl.dot(shares.to(DOT), value.to(DOT), input_precision=PRECISION)
                result += value.to(tl.float32) * through
                tl.store(out + at_value, result.to(out.dtype.element_ty), mask=in_value)
                scaled = (value.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(DOT)
                state = state * tl.exp(last)
                state += tl.dot(tl.trans(key), scaled, input_precision=PRECISION)
            target = tl.where((part == 0) & (kept >= 0), kept, slot)
            tl.store(states + target.to(tl.int64) * state_stride + in_slot, state, mask=in_state)
            begin = middle
            middle = end


def state_space(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    snapshots: Tensor | None,
    out: Tensor | None,
    most: int,
    ends: Tensor | None = None,
    drafted: Tensor | None = None,
) -> None:
    """Write the output of rows of at most ``most`` tokens to ``out``, if there is one; advance their states.

    Arguments are those of ``gated_delta.delta_rule``, with time steps dt [tokens, value_heads], at any stride of rows,
    in place of betas and decays.
    """
    value_heads, value_dim = v.shape[1:]
    rows, warps = _RULE_TILES
    block = min(rows, triton.next_power_of_2(value_dim))
    _state_space_kernel[(value_heads, triton.cdiv(value_dim, block), len(slots))](
        *_inputs(q, k, v, dt, weights),
        states,
        states.stride(0),
        slots,
        query_starts,
        query_starts[1:] if ends is None else ends,
        query_starts if snapshots is None else snapshots,
        slots if drafted is None else drafted,
        v if out is None else out,
        most,
        **_sizes(k, v),
        BLOCK_VALUE=block,
        BLOCK_KEY=triton.next_power_of_2(k.shape[2]),
        SNAPSHOTS=snapshots is not None,
        HAS_DRAFTS=drafted is not None,
        HAS_OUT=out is not None,
        num_warps=warps,
    )


def chunk_state_space(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    snapshots: Tensor,
    out: Tensor,
    rows: Tensor,
) -> None:
    """Do what ``state_space`` does for the long rows [long rows, 2] int32 of a ``DeltaChunks``."""
    value_heads, value_dim = v.shape[1:]
    block_key = max(triton.next_power_of_2(k.shape[2]), 16)
    tile = max(16, min(triton.next_power_of_2(value_dim), _TILE // block_key))
    _chunk_kernel[(triton.cdiv(value_dim, tile), value_heads, len(rows))](
        *_inputs(q, k, v, dt, weights),
        states,
        states.stride(0),
        slots,
        query_starts,
        snapshots,
        rows,
        out,
        **_sizes(k, v),
        BLOCK_KEY=block_key,
        TILE_VALUES=tile,
        CHUNK=_CHUNK,
        # numpy, in which the interpreter multiplies, has no bfloat16.
        DOT=tl.float32 if triton.knobs.runtime.interpret else _DOT[v.dtype],
        PRECISION="tf32x3" if v.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=1,
    )


def _inputs(q: Tensor, k: Tensor, v: Tensor, dt: Tensor, weights: Mamba2Weights) -> tuple[Any, ...]:
    assert dt.stride(1) == 1
    heads = weights.a_log, weights.dt_bias, weights.skip
    return q, k, v, dt, dt.stride(0), *heads, weights.least_step, weights.most_step


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    return {
        "KEY_HEADS": k.shape[1],
        "KEY_DIM": k.shape[2],
        "VALUE_HEADS": v.shape[1],
        "VALUE_DIM": v.shape[2],
    }
