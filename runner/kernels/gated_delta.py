"""The short convolution and the gated delta rule as Triton kernels. ``gated_delta_reference.py`` defines both.

``convolve`` leaves queries and keys of length 1. ``delta_rule`` then computes token after token: the state stays in
registers, so a single token costs one read and one write of it. ``gated_delta_chunks.py`` is faster for prompts.

Rows without tokens, and with slot -1, change no state; the output of such tokens is unspecified. Rows with drafts leave
their states as they are: which drafts are right is known later, and then the right ones are computed again.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kv.states import HeadStateSpec, StateSpec
from runner.batch import GatedDeltaWeights
from runner.kernels.gated_delta_reference import NORM_EPS

RULE_TILES = 8, 1  # rows of a state in a program, warps: 8 × 128 float32 values are 32 registers of a thread
_CHANNELS = 512  # channels of a program that stores history


class ConvolutionTiles(NamedTuple):
    """Sizes of a program that convolves prompts."""

    tokens: int = 16  # tokens of a tile: with 4 warps and 128 channels a thread has 16 values
    tiles: int = 4
    warps: int = 4
    registers: int | None = 128  # most registers of a thread


CONVOLUTION_TILES = ConvolutionTiles()


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _store_history(
    mixed,  # input of the row's first token, first of these channels
    mixed_stride,
    history,  # the row's, first of these channels
    target,  # ``history``, or another slot's
    length,  # tokens, at least 1
    channels,  # [BLOCK], relative
    mask,
    WIDTH: tl.constexpr,
):
    """Store the last WIDTH - 1 inputs of history and tokens. No value is read after its place was written."""
    BEFORE: tl.constexpr = WIDTH - 1
    for index in tl.static_range(BEFORE):
        local = channels * 0 + length - BEFORE + index  # token that is kept there; negative: it is in the history
        is_new = local >= 0
        new = tl.load(mixed + local.to(tl.int64) * mixed_stride + channels, mask=mask & is_new, other=0.0)
        old = tl.load(history + channels * BEFORE + BEFORE + local, mask=mask & (local < 0), other=0.0)
        value = tl.where(is_new, new.to(history.dtype.element_ty), old)
        tl.store(target + channels * BEFORE + index, value, mask=mask)


@triton.jit
def _channels_of(
    head,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return the first channel of a head of queries, of keys or of values, and the number of its channels."""
    is_value = head >= 2 * KEY_HEADS
    of_value = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM
    first = tl.multiple_of(tl.where(is_value, of_value, head * KEY_DIM), ALIGNMENT)
    return first, tl.multiple_of(tl.where(is_value, VALUE_DIM, KEY_DIM), ALIGNMENT)


@triton.jit
def _store_head(
    total,  # [TOKENS, BLOCK_DIM] float32: the convolution, 0 in columns without a channel
    tokens,  # [TOKENS]
    within,  # [BLOCK_DIM]
    mask,  # [TOKENS, BLOCK_DIM]
    head,
    q,
    k,
    v,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Store silu of the convolution; if NORMED, with length 1 for queries and keys."""
    y = _silu(total)  # 0 for 0
    tokens = tokens.to(tl.int64)[:, None]
    if head >= 2 * KEY_HEADS:
        at_value = (tokens * VALUE_HEADS + head - 2 * KEY_HEADS) * VALUE_DIM + within[None, :]
        tl.store(v + at_value, y.to(v.dtype.element_ty), mask=mask)
    else:
        if NORMED:
            y = y * tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
        if head < KEY_HEADS:
            at_query = (tokens * KEY_HEADS + head) * KEY_DIM + within[None, :]
            tl.store(q + at_query, y.to(q.dtype.element_ty), mask=mask)
        else:
            at_key = (tokens * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + within[None, :]
            tl.store(k + at_key, y.to(k.dtype.element_ty), mask=mask)


@triton.jit
def _load_taps(weight, within, valid, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Return a tuple of WIDTH weights [BLOCK_DIM] in float32; ``weight`` is the first one of the channels."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        of_tap = tl.load(weight + tap * CHANNELS + within, mask=valid, other=0.0).to(tl.float32)
        taps = taps + (of_tap,)  # type: ignore[assignment]  # noqa: RUF005
    return taps


@triton.jit
def _biased(total, bias, within, valid, HAS_BIAS: tl.constexpr):
    """Add a bias of channels to a convolution [TOKENS, BLOCK_DIM]; ``bias`` is the first one's."""
    if HAS_BIAS:
        total += tl.load(bias + within, mask=valid, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _convolve_tile(
    mixed,  # first of the channels
    mixed_stride,
    taps,  # result of _load_taps
    history,  # first of the channels
    history_stride,
    tokens,  # [TOKENS]
    local,  # [TOKENS]: index of each token in its row
    slots,  # [TOKENS]: of its row; no history is read for -1
    token_mask,  # [TOKENS]: whether there is such a token
    within,  # [BLOCK_DIM]
    valid,  # [BLOCK_DIM]
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Return the convolution [TOKENS, BLOCK_DIM] in float32, of inputs and, before the first ones, the history."""
    BEFORE: tl.constexpr = WIDTH - 1
    of_slot = history + tl.maximum(slots, 0).to(tl.int64) * history_stride
    has_slot = token_mask & (slots >= 0)
    total = tl.zeros([TOKENS, BLOCK_DIM], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        at = local - (BEFORE - tap)
        inside = at >= 0
        at_new = (tokens - (BEFORE - tap)).to(tl.int64) * mixed_stride
        is_new = (token_mask & inside)[:, None] & valid[None, :]
        is_old = (has_slot & (at < 0))[:, None] & valid[None, :]
        new = tl.load(mixed + at_new[:, None] + within[None, :], mask=is_new, other=0.0)
        at_old = of_slot[:, None] + within[None, :] * BEFORE + (BEFORE + at)[:, None]
        old = tl.load(at_old, mask=is_old, other=0.0)
        x = tl.where(inside[:, None], new.to(history.dtype.element_ty), old).to(tl.float32)
        total += x * taps[tap][None, :]
    return total


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "search"])
def _convolve_kernel(
    mixed,  # [num_tokens, CHANNELS], rows mixed_stride apart
    mixed_stride,
    weight,  # [WIDTH, CHANNELS]
    bias,  # [CHANNELS] float32, read if HAS_BIAS
    history,  # [slots, CHANNELS, WIDTH - 1], slots history_stride apart
    history_stride,
    slots,  # [num_rows] int32
    query_starts,  # [num_rows + 1] int32
    num_rows,
    num_tokens,
    search,  # steps of a search among the rows
    q,  # out [num_tokens, KEY_HEADS, KEY_DIM]
    k,  # out [num_tokens, KEY_HEADS, KEY_DIM]
    v,  # out [num_tokens, VALUE_HEADS, VALUE_DIM]
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a tile
    TILES: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # channels
    NORMED: tl.constexpr,  # whether queries and keys get length 1
    HAS_BIAS: tl.constexpr,
):
    """Grid (blocks of TILES tiles, heads of queries, then of keys, then of values). It leaves the history as it is.

    A block in the midst of a row reads inputs only: four loads of each, three of which hit the L1 cache.
    """
    BEFORE: tl.constexpr = WIDTH - 1
    head = tl.program_id(1)
    channel, count = _channels_of(head, KEY_HEADS, KEY_DIM, VALUE_DIM, ALIGNMENT)
    within = tl.arange(0, BLOCK_DIM)
    valid = within < count
    start = tl.program_id(0) * TILES * TOKENS
    row = start * 0  # to be the last row that does not begin behind the block
    after = num_rows
    for _ in range(search):
        middle = (row + after) // 2
        before = tl.load(query_starts + middle) <= start
        row = tl.where(before, middle, row)
        after = tl.where(before, after, middle)
    begin = tl.load(query_starts + row)
    end = tl.load(query_starts + row + 1)
    if (start - begin >= BEFORE) & (start + TILES * TOKENS <= end):
        taps = _load_taps(weight + channel, within, valid, WIDTH, CHANNELS)
        for tile in range(TILES):
            tokens = start + tile * TOKENS + tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, BLOCK_DIM], dtype=tl.float32)
            for tap in tl.static_range(WIDTH):
                at = (tokens - (BEFORE - tap)).to(tl.int64) * mixed_stride + channel
                x = tl.load(mixed + at[:, None] + within[None, :], mask=valid[None, :], other=0.0)
                total += x.to(history.dtype.element_ty).to(tl.float32) * taps[tap][None, :]
            _store_head(
                _biased(total, bias + channel, within, valid, HAS_BIAS), tokens, within, valid[None, :], head,
                q, k, v, eps, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, NORMED,
            )  # fmt: skip
    else:
        taps = _load_taps(weight + channel, within, valid, WIDTH, CHANNELS)
        for tile in range(TILES):
            tokens = start + tile * TOKENS + tl.arange(0, TOKENS)
            token_mask = tokens < num_tokens
            rows = tl.zeros([TOKENS], dtype=tl.int32)  # row of each token
            ends = tl.zeros([TOKENS], dtype=tl.int32) + num_rows
            for _ in range(search):
                middles = (rows + ends) // 2
                befores = tl.load(query_starts + middles) <= tokens
                rows = tl.where(befores, middles, rows)
                ends = tl.where(befores, ends, middles)
            total = _convolve_tile(
                mixed + channel, mixed_stride, taps, history + channel * BEFORE, history_stride, tokens,
                tokens - tl.load(query_starts + rows), tl.load(slots + rows), token_mask, within, valid,
                WIDTH, TOKENS, BLOCK_DIM,
            )  # fmt: skip
            _store_head(
                _biased(total, bias + channel, within, valid, HAS_BIAS), tokens, within,
                token_mask[:, None] & valid[None, :], head, q, k, v, eps,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, NORMED,
            )  # fmt: skip


@triton.jit
def _convolve_singles_kernel(
    mixed, mixed_stride, weight, bias, history, history_stride, slots, query_starts, q, k, v, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
    NORMED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Convolve rows that have one token, or none, and store their history. Grid (rows, heads)."""
    BEFORE: tl.constexpr = WIDTH - 1
    row = tl.program_id(0)
    head = tl.program_id(1)
    channel, count = _channels_of(head, KEY_HEADS, KEY_DIM, VALUE_DIM, ALIGNMENT)
    within = tl.arange(0, BLOCK_DIM)
    valid = within < count
    tokens = row + tl.arange(0, 1)
    token_mask = tl.load(query_starts + tokens + 1) > tl.load(query_starts + tokens)
    taps = _load_taps(weight + channel, within, valid, WIDTH, CHANNELS)
    total = _convolve_tile(
        mixed + channel, mixed_stride, taps, history + channel * BEFORE, history_stride,
        tokens, tokens - row, tl.load(slots + tokens), token_mask, within, valid, WIDTH, 1, BLOCK_DIM,
    )  # fmt: skip
    _store_head(
        _biased(total, bias + channel, within, valid, HAS_BIAS), tokens, within, valid[None, :], head, q, k, v, eps,
        KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, NORMED,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read the history
    slot = tl.load(slots + row)
    if (slot >= 0) & (tl.load(query_starts + row + 1) > tl.load(query_starts + row)):
        of_slot = history + slot.to(tl.int64) * history_stride + channel * BEFORE
        _store_history(
            mixed + row.to(tl.int64) * mixed_stride + channel, mixed_stride, of_slot, of_slot, 1, within, valid, WIDTH
        )


@triton.jit
def _store_history_kernel(
    mixed, mixed_stride, history, history_stride, slots, query_starts, ends, snapshots, drafted, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SNAPSHOTS: tl.constexpr, HAS_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Store the history of a row, and of its snapshot before. Grid (rows, blocks of channels).

    Row r ends before token ends[r]. With HAS_DRAFTS, the history of some rows stays as it is.
    """
    row = tl.program_id(0)
    begin = tl.load(query_starts + row)
    length = tl.load(ends + row) - begin
    if HAS_DRAFTS:
        length = tl.where(tl.load(drafted + row) != 0, 0, length)
    slot = tl.load(slots + row)
    if (length > 0) & (slot >= 0):
        channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = channels < CHANNELS
        first = mixed + begin.to(tl.int64) * mixed_stride
        of_slot = history + slot.to(tl.int64) * history_stride
        if SNAPSHOTS:
            kept = tl.load(snapshots + 2 * row + 1)
            if kept >= 0:
                target = history + kept.to(tl.int64) * history_stride
                length_then = tl.load(snapshots + 2 * row)
                _store_history(first, mixed_stride, of_slot, target, length_then, channels, mask, WIDTH)
        _store_history(first, mixed_stride, of_slot, of_slot, length, channels, mask, WIDTH)


@triton.jit
def log_gates(ba, token, head, a_log, dt_bias, VALUE_HEADS: tl.constexpr):
    """Return β and log α of tokens of a head, in float32."""
    at = token * 2 * VALUE_HEADS + head
    b = tl.load(ba + at).to(tl.float32)
    a = tl.load(ba + at + VALUE_HEADS).to(tl.float32) + dt_bias
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return 1.0 / (1.0 + tl.exp(-b)), -tl.exp(a_log) * softplus


@triton.jit
def _delta_rule_kernel(
    q,  # [tokens, KEY_HEADS, KEY_DIM], of length 1
    k,  # [tokens, KEY_HEADS, KEY_DIM], of length 1
    v,  # [tokens, VALUE_HEADS, VALUE_DIM]
    ba,  # [tokens, 2 * VALUE_HEADS]
    a_log,  # [VALUE_HEADS] float32
    dt_bias,  # [VALUE_HEADS] float32
    states,  # [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM] float32, slots state_stride apart
    state_stride,
    slots,  # [rows] int32
    query_starts,  # [rows + 1] int32
    ends,  # [rows] int32: behind the last token of each row
    snapshots,  # [rows, 2] int32, read if SNAPSHOTS
    drafted,  # [rows] int32: 1 if the state stays as it is, read if HAS_DRAFTS
    out,  # out [tokens, VALUE_HEADS, VALUE_DIM], written if HAS_OUT
    scale,
    most,  # tokens of a row that is computed
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
    if (end > begin) & (end - begin <= most) & (slot >= 0):
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
        for number in range(end - begin):
            token = begin.to(tl.int64) + number
            at_key = (token * KEY_HEADS + key_head) * KEY_DIM + columns
            at_value = (token * VALUE_HEADS + head) * VALUE_DIM + values
            key = tl.load(k + at_key, mask=has_key, other=0.0).to(tl.float32)
            value = tl.load(v + at_value, mask=has_value, other=0.0).to(tl.float32)
            beta, log_decay = log_gates(ba, token, head, log_a, bias, VALUE_HEADS)
            state = state * tl.exp(log_decay)
            correction = (value - tl.sum(state * key[None, :], axis=1)) * beta
            state += correction[:, None] * key[None, :]
            if HAS_OUT:
                query = tl.load(q + at_key, mask=has_key, other=0.0).to(tl.float32)
                output = tl.sum(state * query[None, :], axis=1) * scale
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


def convolve(
    mixed: Tensor,
    weight: Tensor,
    history: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    snapshots: Tensor | None,
    spec: HeadStateSpec,
    drafted: Tensor | None = None,
    bias: Tensor | None = None,
    normed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return silu of the convolution as queries and keys, of length 1 if ``normed``, and values; advance the history.

    mixed [tokens, channels], with rows at any stride, → q, k [tokens, key_heads, key_dim] and v [tokens, value_heads,
    value_dim]. weight [conv_width, channels]; history: a layer's view of ``StateCache.conv``; slots [rows] and
    query_starts [rows + 1] int32. snapshots [rows, 2] int32: the history after so many tokens of a row goes to this
    slot as well, if there is one; None: every row has one token, or none. The history of ``drafted`` rows [rows] int32
    stays as it is. bias [channels] float32.
    """
    tokens = len(mixed)
    rows = len(slots)
    num_heads = 2 * spec.key_heads + spec.value_heads
    assert mixed.stride(1) == 1
    assert weight.is_contiguous()
    q = mixed.new_empty(tokens, spec.key_heads, spec.key_dim)
    k = torch.empty_like(q)
    v = mixed.new_empty(tokens, spec.value_heads, spec.value_dim)
    of_channels = weight, weight if bias is None else bias
    inputs = mixed, mixed.stride(0), *of_channels, history, history.stride(0), slots, query_starts
    sizes: dict[str, int] = {
        "KEY_HEADS": spec.key_heads,
        "VALUE_HEADS": spec.value_heads,
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "CHANNELS": spec.channels,
        "WIDTH": spec.conv_width,
        "BLOCK_DIM": triton.next_power_of_2(max(spec.key_dim, spec.value_dim)),
        "ALIGNMENT": gcd(spec.key_dim, spec.value_dim, 16),
        "NORMED": normed,
        "HAS_BIAS": bias is not None,
    }
    if snapshots is None:
        assert tokens == rows
        _convolve_singles_kernel[(rows, num_heads)](*inputs, q, k, v, NORM_EPS, **sizes, num_warps=1)
        return q, k, v
    of = CONVOLUTION_TILES
    _convolve_kernel[(triton.cdiv(tokens, of.tokens * of.tiles), num_heads)](
        *inputs,
        rows,
        tokens,
        rows.bit_length(),
        q,
        k,
        v,
        NORM_EPS,
        **sizes,
        TOKENS=of.tokens,
        TILES=of.tiles,
        num_warps=of.warps,
        maxnreg=of.registers,
    )
    store_history(mixed, history, slots, query_starts, query_starts[1:], spec, snapshots, drafted)
    return q, k, v


def store_history(
    mixed: Tensor,
    history: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    ends: Tensor,
    spec: StateSpec,
    snapshots: Tensor | None = None,
    drafted: Tensor | None = None,
) -> None:
    """Advance the history by tokens query_starts[r] … ends[r] - 1 of each row r; see ``convolve``."""
    _store_history_kernel[(len(slots), triton.cdiv(spec.channels, _CHANNELS))](
        mixed,
        mixed.stride(0),
        history,
        history.stride(0),
        slots,
        query_starts,
        ends,
        slots if snapshots is None else snapshots,
        slots if drafted is None else drafted,
        CHANNELS=spec.channels,
        WIDTH=spec.conv_width,
        BLOCK=_CHANNELS,
        SNAPSHOTS=snapshots is not None,
        HAS_DRAFTS=drafted is not None,
        num_warps=4,
    )


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ba: Tensor,
    weights: GatedDeltaWeights,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    snapshots: Tensor | None,
    out: Tensor | None,
    most: int,
    ends: Tensor | None = None,
    drafted: Tensor | None = None,
) -> None:
    """Write the output of rows of at most ``most`` tokens to ``out``, if there is one.

    Advance their states, but not those of ``drafted`` rows [rows] int32, and store snapshots.

    q, k, v and snapshots are those of ``convolve``, ba [tokens, 2 * value_heads], out [tokens, value_heads, value_dim].
    states: a layer's view of ``StateCache.delta``. Row r has the tokens query_starts[r] … ends[r] - 1, by default all
    before the next row.
    """
    _, key_heads, key_dim = k.shape
    _, value_heads, value_dim = v.shape
    assert ba.is_contiguous()
    rows, warps = RULE_TILES
    block = min(rows, triton.next_power_of_2(value_dim))
    _delta_rule_kernel[(value_heads, triton.cdiv(value_dim, block), len(slots))](
        q,
        k,
        v,
        ba,
        weights.a_log,
        weights.dt_bias,
        states,
        states.stride(0),
        slots,
        query_starts,
        query_starts[1:] if ends is None else ends,
        query_starts if snapshots is None else snapshots,
        slots if drafted is None else drafted,
        v if out is None else out,
        key_dim**-0.5,
        most,
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        BLOCK_VALUE=block,
        SNAPSHOTS=snapshots is not None,
        HAS_DRAFTS=drafted is not None,
        HAS_OUT=out is not None,
        num_warps=warps,
    )
