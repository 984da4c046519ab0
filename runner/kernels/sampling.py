"""Triton kernels for sampling. Their plain forms are runner/sampling/sampler.py and runner/sampling/noise.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _gumbel(key, token):
    """Return noise for tokens [n] from a row's 64-bit key."""
    x = (token.to(tl.uint32) * 0x9E3779B9) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["logits_stride", "vocab_size", "parts"])
def best_of_parts_kernel(
    logits,  # [logit rows, logits_stride], any float dtype
    logits_stride,
    vocab_size,
    logits_row,  # [draws] int32
    temperature,  # [draws] float32; 0 is greedy
    row_key,  # [draws] int64: the key of seed and choice
    draw_slot,  # [draws] int32
    num_tokens,  # state: [slots] int32: with the drafts before it, the position of the token being drawn
    drafts_before,  # [draws] int32
    best_value,  # out [draws, parts] float32
    best_token,  # out [draws, parts] int32
    parts,
    PART: tl.constexpr,
):
    """Find the best token of a part of the vocabulary, with noise if the row is sampled. Grid (draws, parts)."""
    draw = tl.program_id(0)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    mask = token < vocab_size
    row = tl.load(logits_row + draw).to(tl.int64)
    value = tl.load(logits + row * logits_stride + token, mask=mask, other=float("-inf")).to(tl.float32)
    temp = tl.load(temperature + draw)
    if temp > 0.0:
        position = tl.load(num_tokens + tl.load(draw_slot + draw)) + tl.load(drafts_before + draw)
        key = _mix64(tl.load(row_key + draw).to(tl.uint64, bitcast=True) ^ position.to(tl.uint64))
        value = value / temp + _gumbel(key, token)
        value = tl.where(mask, value, float("-inf"))
    best, index = tl.max(value, axis=0, return_indices=True)
    tl.store(best_value + draw * parts + part, best)
    tl.store(best_token + draw * parts + part, part * PART + index)


@triton.jit(do_not_specialize=["parts"])
def best_of_all_kernel(best_value, best_token, sampled, parts, PARTS: tl.constexpr):
    """Find the best token of each draw. Grid (draws,)."""
    draw = tl.program_id(0)
    part = tl.arange(0, PARTS)
    value = tl.load(best_value + draw * parts + part, mask=part < parts, other=float("-inf"))
    tl.store(sampled + draw, tl.load(best_token + draw * parts + tl.argmax(value, axis=0)))


@triton.jit(do_not_specialize=["logits_stride", "vocab_size", "words_stride"])
def mask_kernel(
    logits,  # [draws, logits_stride] float32, in place: tokens that a mask forbids become -inf
    logits_stride,
    vocab_size,
    words,  # [masks, words_stride] int32: bit t % 32 of word t // 32 allows token t
    words_stride,
    mask_of_draw,  # [draws] int32, -1 for none
    PART: tl.constexpr,
):
    """Forbid the tokens that grammars do not allow. Grid (draws, parts)."""
    draw = tl.program_id(0)
    row = tl.load(mask_of_draw + draw)
    if row >= 0:
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = token < vocab_size
        word = tl.load(words + row.to(tl.int64) * words_stride + token // 32, mask=inside, other=0)
        at = logits + draw.to(tl.int64) * logits_stride + token
        tl.store(at, float("-inf"), mask=inside & (((word >> (token % 32)) & 1) == 0))


@triton.jit
def _ordered(value):
    """Map float32 to uint32 with the same order."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit(do_not_specialize=["logits_stride", "vocab_size"])
def truncate_kernel(
    logits,  # [rows, logits_stride] float32, in place: tokens that are cut off become -inf
    logits_stride,
    vocab_size,
    temperature,  # [rows] float32, above 0
    top_k,  # [rows] int32, vocab_size is off
    top_p,  # [rows] float32, 1 is off
    min_p,  # [rows] float32, 0 is off
    PART: tl.constexpr,
):
    """Apply top-k, then top-p among those, then min-p. Grid (rows,).

    Nothing is sorted. A token's rank, and the probability of all better tokens, only grow as logits fall, so each limit
    is a threshold. Bisection over the 2^32 floats finds it, in a pass over the row for each of 32 bits.
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * logits_stride
    temp = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor_p = tl.load(min_p + row)
    at = tl.arange(0, PART)
    highest = float("-inf")
    for part in range(0, vocab_size, PART):
        value = tl.load(start + part + at, mask=part + at < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(value, axis=0))

    # The largest threshold that at least k tokens reach.
    threshold = tl.full([], 0, tl.uint32)
    if k < vocab_size:
        for bit in range(32):
            trial = threshold | (tl.full([], 1, tl.uint32) << (31 - bit))
            count = 0
            for part in range(0, vocab_size, PART):
                mask = part + at < vocab_size
                value = tl.load(start + part + at, mask=mask, other=float("-inf"))
                count += tl.sum(((_ordered(value) >= trial) & mask).to(tl.int32), axis=0)
            if count >= k:
                threshold = trial

    if p < 1.0:
        total = 0.0
        for part in range(0, vocab_size, PART):
            value = tl.load(start + part + at, mask=part + at < vocab_size, other=float("-inf"))
            total += tl.sum(tl.where(_ordered(value) >= threshold, tl.exp((value - highest) / temp), 0.0), axis=0)
        # The largest threshold that tokens of total probability p or more reach: all better tokens have less.
        nucleus = tl.full([], 0, tl.uint32)
        for bit in range(32):
            trial = nucleus | (tl.full([], 1, tl.uint32) << (31 - bit))
            mass = 0.0
            for part in range(0, vocab_size, PART):
                value = tl.load(start + part + at, mask=part + at < vocab_size, other=float("-inf"))
                mass += tl.sum(tl.where(_ordered(value) >= trial, tl.exp((value - highest) / temp), 0.0), axis=0)
            if mass >= p * total:
                nucleus = trial
        best = _ordered(highest)  # kept for any p
        threshold = tl.maximum(threshold, tl.minimum(nucleus, best))

    # A token's probability relative to the best is exp(difference of logits / temperature).
    floor = float("-inf")
    if floor_p > 0.0:
        floor = highest + tl.log(floor_p) * temp
    for part in range(0, vocab_size, PART):
        mask = part + at < vocab_size
        value = tl.load(start + part + at, mask=mask, other=float("-inf"))
        kept = (_ordered(value) >= threshold) & (value >= floor)
        tl.store(start + part + at, tl.where(kept, value, float("-inf")), mask=mask)
