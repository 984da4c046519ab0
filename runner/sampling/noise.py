"""Noise for sampling: a pure function of (seed, choice, position, token id), without a generator or state.

So a request samples the same tokens in any batch, after preemption, and on another node. Any backend can produce the
same noise with 64- and 32-bit unsigned integers; all arithmetic wraps around:

    key     = mix64(mix64(mix64(seed + G) ^ choice) ^ position)                      per row, 64 bits
    x       = token * 0x9E3779B9 ^ low32(key)                                        per token, 32 bits from here
    x       = (x ^ x >> 16) * 0x7FEB352D;   x = x ^ high32(key)
    x       = (x ^ x >> 15) * 0x846CA68B;   x = x ^ x >> 16
    u       = ((x >> 9) + 0.5) / 2^23                                                in (0, 1), exact in float32
    gumbel  = -log(-log(u))

    mix64 is SplitMix64's finalizer: z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9; z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z ^ z >> 31. G = 0x9E3779B97F4A7C15. The 32-bit multipliers are those of C. Wellons' "lowbias32".

``position`` is the index of the sampled token in its sequence. argmax(logits + gumbel) is then a sample of
softmax(logits) (the Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.kernels.reference import mix64

_GOLDEN_64 = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def choice_keys(seeds: Sequence[int], choices: Sequence[int]) -> NDArray[np.uint64]:
    """Return the part of each key without the position: mix64(mix64(seed + G) ^ choice)."""
    key = np.array([(seed + _GOLDEN_64) & _MASK_64 for seed in seeds], dtype=np.uint64)
    return mix64(mix64(key) ^ np.array(choices, dtype=np.uint64))


def row_keys(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Return the 64-bit key of each row."""
    return mix64(choice_keys(seeds, choices) ^ np.array(positions, dtype=np.uint64))


def gumbel_noise(keys: NDArray[np.uint64], token_ids: Tensor) -> Tensor:
    """Return noise [rows, tokens] float32 for keys [rows] and token_ids [tokens] or [rows, tokens] int32.

    torch has no unsigned 32-bit arithmetic. int32 wraps around alike, and a logical shift is an arithmetic one with
    the copies of the sign masked off.
    """
    halves = keys.astype("<u8").view("<i4").reshape(-1, 2)  # low, high
    low, high = torch.from_numpy(halves.T.copy()).to(token_ids.device).unsqueeze(-1)  # each [rows, 1]
    x = token_ids * _signed(0x9E3779B9) ^ low
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x7FEB352D)
    x ^= high
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    gumbel: Tensor = uniform.log_().neg_().log_().neg_()
    return gumbel


def _signed(value: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return value - (1 << 32) if value >= 1 << 31 else value
