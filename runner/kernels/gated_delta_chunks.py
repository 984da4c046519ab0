"""The gated delta rule over chunks of prompts as Triton kernels. ``gated_delta_reference.py`` has the formulas.

The system of a chunk does not depend on the state, so its inverse T is computed for all chunks at once. With
W = T (β γ K) and U = T (β V), what remains to be done chunk after chunk are four small products:

    1. ``_invert_kernel``   all chunks at once: log γ, W, U and the lower part of Q Kᵀ ∘ D
    2. ``_advance_kernel``  chunk after chunk: U ← U - W Sᵀ, the output, S ← γ_last S + …

Products are in the dtype of the inputs with float32 sums, the inverse is in TF32, and the state in float32. Products of
float32 inputs are sums of three in TF32, nearly as exact as in float32. Decays are only used as quotients of a later
and an earlier one, at most 1, however strong they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from runner.batch import GatedDeltaWeights
from runner.kernels.device_limits import shared_memory_of
from runner.kernels.gated_delta import log_gates

_CHUNK = 64  # tokens
_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class DeltaTiles(NamedTuple):
    """The tile of the kernel that goes over chunks, and launch options of both."""

    advance_values: int = 32  # elements of a value in a program
    advance_warps: int = 4
    advance_stages: int = 3
    invert_warps: int = 4
    invert_registers: int | None = 168  # most of a thread


@dataclass(frozen=True)
class DeltaChunks:
    """The chunks of the long rows of a step."""

    chunks: Tensor  # [chunks, 2] int32: first token, number of tokens; row after row
    rows: Tensor  # [long rows, 2] int32: the row, its first chunk

    @classmethod
    def of(
        cls, query_starts: NDArray[np.int32], cuts: NDArray[np.int32], most_short: int, device: torch.device
    ) -> DeltaChunks | None:
        """Divide the rows of more than ``most_short`` tokens; None without any. Does not wait for the device.

        cuts [rows]: a chunk ends after so many tokens of a row; 0 if none has to.
        """
        rows = np.flatnonzero(np.diff(query_starts) > most_short)
        if not len(rows):
            return None
        begins = query_starts[rows]
        ends = query_starts[rows + 1]
        middles = begins + cuts[rows]
        # Two parts of each row, the first one without tokens if nothing cuts it.
        begins, ends = (np.stack(parts, axis=1).reshape(-1) for parts in ((begins, middles), (middles, ends)))
        counts = -(-(ends - begins) // _CHUNK)
        firsts = np.cumsum(counts) - counts
        part = np.repeat(np.arange(len(begins)), counts)
        starts = begins[part] + (np.arange(len(part)) - firsts[part]) * _CHUNK
        chunks = np.stack((starts, np.minimum(ends[part] - starts, _CHUNK)), axis=1)
        return cls(to_device(chunks, device), to_device(np.stack((rows, firsts[::2]), axis=1), device))


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the values as int32, without waiting for the device."""
    host = torch.from_numpy(values.astype(np.int32))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@triton.jit
def _inverse(system, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + ``system``, which has values below its diagonal only, all [CHUNK, CHUNK].

    Blocks of 16 × 16 on the diagonal are solved row by row. With T their inverses, and M = T times the part of the
    system below these blocks, the inverse is (I + M)⁻¹ T = (I - M) (I + M²) T, as M⁴ = 0 for four blocks.
    """
    SIZE: tl.constexpr = 16
    BLOCKS: tl.constexpr = CHUNK // SIZE
    tl.static_assert(BLOCKS <= 4)
    block = tl.arange(0, BLOCKS)
    within = tl.arange(0, SIZE)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(system, [BLOCKS, SIZE, BLOCKS, SIZE])
    diagonal = tl.sum(tl.where(on_diagonal, parts, 0.0), axis=2)  # [block, row, column]
    rest = tl.reshape(tl.where(on_diagonal, 0.0, parts), [CHUNK, CHUNK])
    rows = within[None, :, None]
    columns = within[None, None, :]
    solved = tl.where((rows == columns) & (block[:, None, None] >= 0), 1.0, 0.0)
    for step in tl.static_range(SIZE - 1):
        # Row ``step`` is solved; subtract it from the rows below.
        factors = tl.sum(tl.where(columns == step, diagonal, 0.0), axis=2)
        row = tl.sum(tl.where(rows == step, solved, 0.0), axis=1)
        solved -= factors[:, :, None] * row[:, None, :]
    inverse = tl.reshape(tl.where(on_diagonal, solved[:, :, None, :], 0.0), [CHUNK, CHUNK])
    m = tl.dot(inverse, rest, input_precision=PRECISION)
    inverse += tl.dot(tl.dot(m, m, input_precision=PRECISION), inverse, input_precision=PRECISION)
    return inverse - tl.dot(m, inverse, input_precision=PRECISION)


@triton.jit
def _invert_kernel(
    q,  # [tokens, KEY_HEADS, KEY_DIM], of length 1
    k,  # [tokens, KEY_HEADS, KEY_DIM], of length 1
    v,  # [tokens, VALUE_HEADS, VALUE_DIM]
    ba,  # [tokens, 2 * VALUE_HEADS]
    a_log,  # [VALUE_HEADS] float32
    dt_bias,  # [VALUE_HEADS] float32
    chunks,  # [chunks, 2] int32
    totals,  # out [chunks, VALUE_HEADS, CHUNK] float32: log γ
    w,  # out [chunks, VALUE_HEADS, CHUNK, BLOCK_KEY]
    u,  # out [chunks, VALUE_HEADS, CHUNK, BLOCK_VALUE]
    scores,  # out [chunks, VALUE_HEADS, CHUNK, CHUNK]
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,  # dtype of products
    PRECISION: tl.constexpr,  # input precision of float32 products
):
    """Grid (value heads, chunks)."""
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    begin = tl.load(chunks + 2 * chunk).to(tl.int64)
    count = tl.load(chunks + 2 * chunk + 1)
    within = tl.arange(0, CHUNK)
    token_mask = within < count
    tokens = begin + tl.where(token_mask, within, 0)
    keys = tl.arange(0, BLOCK_KEY)
    values = tl.arange(0, BLOCK_VALUE)
    at_key = (tokens * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS))[:, None] * KEY_DIM + keys[None, :]
    in_key = token_mask[:, None] & (keys < KEY_DIM)[None, :]
    key = tl.load(k + at_key, mask=in_key, other=0.0).to(DOT)
    beta, log_decay = log_gates(ba, tokens, head, tl.load(a_log + head), tl.load(dt_bias + head), VALUE_HEADS)
    beta = tl.where(token_mask, beta, 0.0)
    total = tl.cumsum(tl.where(token_mask, log_decay, 0.0), axis=0)
    tile = chunk * VALUE_HEADS + head
    tl.store(totals + tile * CHUNK + within, total)

    seen = within[:, None] >= within[None, :]
    below = within[:, None] > within[None, :]
    decays = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
    query = tl.load(q + at_key, mask=in_key, other=0.0).to(DOT)
    products = tl.where(seen, tl.dot(query, tl.trans(key), input_precision=PRECISION) * decays, 0.0)
    at_scores = tile * CHUNK * CHUNK + within[:, None] * CHUNK + within[None, :]
    tl.store(scores + at_scores, products.to(scores.dtype.element_ty))
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    inverse = _inverse(tl.where(below, beta[:, None] * products * decays, 0.0), CHUNK, PRECISION)
    right = (inverse * (beta * tl.exp(total))[None, :]).to(DOT)
    at_w = tile * CHUNK * BLOCK_KEY + within[:, None] * BLOCK_KEY + keys[None, :]
    tl.store(w + at_w, tl.dot(right, key, input_precision=PRECISION).to(w.dtype.element_ty))
    at_value = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + values[None, :]
    value = tl.load(v + at_value, mask=token_mask[:, None] & (values < VALUE_DIM)[None, :], other=0.0).to(DOT)
    right = (inverse * beta[None, :]).to(DOT)
    at_u = tile * CHUNK * BLOCK_VALUE + within[:, None] * BLOCK_VALUE + values[None, :]
    tl.store(u + at_u, tl.dot(right, value, input_precision=PRECISION).to(u.dtype.element_ty))


@triton.jit
def _advance(
    state,  # [BLOCK_KEY, TILE_VALUES] float32
    tile,  # tile of the first chunk
    begin,  # first token
    end,
    values,  # [TILE_VALUES]
    head,
    q,
    k,
    totals,
    w,
    u,
    scores,
    out,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the output of tokens whose first chunk begins with them; return the state behind them."""
    within = tl.arange(0, CHUNK)
    keys = tl.arange(0, BLOCK_KEY)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    for number in tl.range(0, tl.cdiv(end - begin, CHUNK), num_stages=STAGES):
        start = begin + number * CHUNK
        tokens = start.to(tl.int64) + within
        token_mask = within < end - start
        at_key = (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + keys[None, :]
        in_key = token_mask[:, None] & (keys < KEY_DIM)[None, :]
        query = tl.load(q + at_key, mask=in_key, other=0.0).to(DOT)
        key = tl.load(k + at_key, mask=in_key, other=0.0).to(DOT)
        weights = tl.load(w + tile * CHUNK * BLOCK_KEY + within[:, None] * BLOCK_KEY + keys[None, :]).to(DOT)
        right = tl.load(u + tile * CHUNK * BLOCK_VALUE + within[:, None] * BLOCK_VALUE + values[None, :])
        shares = tl.load(scores + tile * CHUNK * CHUNK + within[:, None] * CHUNK + within[None, :]).to(DOT)
        total = tl.load(totals + tile * CHUNK + within)
        last = tl.load(totals + tile * CHUNK + CHUNK - 1)
        before = state.to(DOT)
        corrections = right.to(tl.float32) - tl.dot(weights, before, input_precision=PRECISION)
        decayed = (corrections * tl.exp(last - total)[:, None]).to(DOT)
        state = state * tl.exp(last)
        state += tl.dot(tl.trans(key), decayed, input_precision=PRECISION)
        result = tl.dot(query, before, input_precision=PRECISION) * tl.exp(total)[:, None]
        result += tl.dot(shares, corrections.to(DOT), input_precision=PRECISION)
        at_out = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + values[None, :]
        in_out = token_mask[:, None] & (values < VALUE_DIM)[None, :]
        tl.store(out + at_out, (result * scale).to(out.dtype.element_ty), mask=in_out)
        tile += VALUE_HEADS
    return state


@triton.jit
def _advance_kernel(
    q,
    k,
    totals,  # [chunks, VALUE_HEADS, CHUNK] float32
    w,  # [chunks, VALUE_HEADS, CHUNK, BLOCK_KEY]
    u,  # [chunks, VALUE_HEADS, CHUNK, BLOCK_VALUE]
    scores,  # [chunks, VALUE_HEADS, CHUNK, CHUNK]
    states,  # [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM] float32, slots state_stride apart
    state_stride,
    slots,  # [rows] int32
    query_starts,  # [rows + 1] int32
    snapshots,  # [rows, 2] int32: tokens, slot
    long_rows,  # [long rows, 2] int32
    out,  # out [tokens, VALUE_HEADS, VALUE_DIM]
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (blocks of a value, value heads, long rows)."""
    head = tl.program_id(1)
    row = tl.load(long_rows + 2 * tl.program_id(2))
    first = tl.load(long_rows + 2 * tl.program_id(2) + 1)
    begin = tl.load(query_starts + row)
    end = tl.load(query_starts + row + 1)
    slot = tl.load(slots + row)
    if slot >= 0:
        keys = tl.arange(0, BLOCK_KEY)
        values = tl.program_id(0) * TILE_VALUES + tl.arange(0, TILE_VALUES)
        in_slot = (head * VALUE_DIM + values)[None, :] * KEY_DIM + keys[:, None]
        in_state = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
        state = tl.load(states + slot.to(tl.int64) * state_stride + in_slot, mask=in_state, other=0.0)  # [keys, values]
        tile = first.to(tl.int64) * VALUE_HEADS + head
        kept = tl.load(snapshots + 2 * row + 1)
        # With a snapshot, the row is two parts; else the second one has no tokens.
        middle = tl.where(kept >= 0, begin + tl.load(snapshots + 2 * row), end)
        for part in range(2):
            state = _advance(
                state, tile, begin, middle, values, head, q, k, totals, w, u, scores, out, scale,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BLOCK_KEY, BLOCK_VALUE, CHUNK, DOT, PRECISION, STAGES,
            )  # fmt: skip
            target = tl.where((part == 0) & (kept >= 0), kept, slot)
            tl.store(states + target.to(tl.int64) * state_stride + in_slot, state, mask=in_state)
            tile += tl.cdiv(middle - begin, CHUNK) * VALUE_HEADS
            begin = middle
            middle = end


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ba: Tensor,
    weights: GatedDeltaWeights,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    snapshots: Tensor,
    out: Tensor,
    planned: DeltaChunks,
    tiles: DeltaTiles | None = None,
) -> None:
    """Do what ``gated_delta.delta_rule`` does, with its arguments, for the rows that ``planned`` has.

    Beside the inputs, this takes 40 KiB per chunk and value head of 128 values in 16 bits.
    """
    _, key_heads, key_dim = q.shape
    _, value_heads, value_dim = v.shape
    assert ba.is_contiguous()
    tiles = tiles or _tiles(v)
    block_key, block_value = (max(triton.next_power_of_2(dim), 16) for dim in (key_dim, value_dim))
    num_chunks = len(planned.chunks)
    totals = torch.empty(num_chunks, value_heads, _CHUNK, dtype=torch.float32, device=v.device)
    w = v.new_empty(num_chunks, value_heads, _CHUNK, block_key)
    u = v.new_empty(num_chunks, value_heads, _CHUNK, block_value)
    scores = v.new_empty(num_chunks, value_heads, _CHUNK, _CHUNK)
    sizes: dict[str, Any] = {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": block_key,
        "BLOCK_VALUE": block_value,
        "CHUNK": _CHUNK,
        # numpy, in which the interpreter multiplies, has no bfloat16.
        "DOT": tl.float32 if triton.knobs.runtime.interpret else _DOT[v.dtype],
        "PRECISION": "tf32x3" if v.dtype == torch.float32 else "tf32",
    }
    _invert_kernel[(value_heads, num_chunks)](
        q,
        k,
        v,
        ba,
        weights.a_log,
        weights.dt_bias,
        planned.chunks,
        totals,
        w,
        u,
        scores,
        **sizes,
        num_warps=tiles.invert_warps,
        maxnreg=tiles.invert_registers,
    )
    values = min(tiles.advance_values, block_value)
    _advance_kernel[(block_value // values, value_heads, len(planned.rows))](
        q,
        k,
        totals,
        w,
        u,
        scores,
        states,
        states.stride(0),
        slots,
        query_starts,
        snapshots,
        planned.rows,
        out,
        key_dim**-0.5,
        **sizes,
        TILE_VALUES=values,
        STAGES=tiles.advance_stages,
        num_warps=tiles.advance_warps,
    )


def _tiles(v: Tensor) -> DeltaTiles:
    if v.dtype == torch.float32:
        return DeltaTiles(advance_values=16, advance_stages=1, invert_registers=None)
    memory = shared_memory_of(v.device)
    return DeltaTiles(advance_stages=3 if memory >= 200 << 10 else 2 if memory >= 140 << 10 else 1)
