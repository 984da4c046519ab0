"""MXFP4 weights in memory, in plain torch: E2M1 values in words of four, and the scale of each block of 32 inputs.

A group is 64 inputs, two blocks. Word j of an output's group has the values of its inputs j, 16 + j, 32 + j, 48 + j. A
shift and a mask make numbers of bfloat16 of three of them, which are 2^-126 of the values; the fourth takes more:

    bit      15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    value     0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
    part      s  s  m  s  e  e  s  e  e  m  e  e  m  e  e  m      sign, exponent, mantissa

Gates and ups alternate in checkpoints. A kernel that computes the activation has, in each 16 outputs, the gates first:
then a thread of a tensor core product holds a gate and its up.

The words of a group are stored together, output by output, so a tile of outputs is one piece of memory. So are the
scales of two groups, four bytes of each output, which a kernel reads as one number.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # inputs that share a scale
GROUP = 64
WORDS = GROUP // 4  # words of an output in a group
SCALED_GROUPS = 2  # groups whose scales are stored together
E8M0_BIAS = 127
#: A stored scale is an exponent of bfloat16: that of 2^110 times the scale. The other 2^16 might overflow.
SCALE_SHIFT = 110
LARGEST_SCALE = 254 - SCALE_SHIFT

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PAIRS = 8  # pairs of gate and up: a thread of a tensor core product holds outputs m and m + 8
_BYTES = SCALED_GROUPS * GROUP // BLOCK


def packed_shapes(outputs: int, inputs: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of one expert's words and scales."""
    groups = -(-inputs // GROUP)
    return (groups, outputs, WORDS), (-(-groups // SCALED_GROUPS), outputs, _BYTES)


def pack(blocks: Tensor) -> Tensor:
    """Return words [groups, outputs, WORDS] int16 of a checkpoint's blocks [outputs, inputs / 32, 16] uint8.

    Byte j of a block has value 2j in its low bits and value 2j + 1 in its high bits.
    """
    outputs, num_blocks, _ = blocks.shape
    inputs = num_blocks * BLOCK
    (groups, _, _), _ = packed_shapes(outputs, inputs)
    codes = blocks.new_zeros(outputs, groups * GROUP)
    pairs = codes[:, :inputs].unflatten(1, (num_blocks, BLOCK // 2, 2))
    pairs[..., 0] = blocks & 15
    pairs[..., 1] = blocks >> 4
    a, b, c, d = codes.view(outputs, groups, 4, WORDS).transpose(0, 1).to(torch.int16).unbind(2)
    words = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | (c & 7)
    return words | (d & 8) << 11 | (d & 6) << 9 | (d & 1) << 13


def unpack(words: Tensor, inputs: int) -> Tensor:
    """Undo ``pack``."""
    codes = _codes(words, inputs)
    return codes[:, :, ::2] | codes[:, :, 1::2] << 4


def pack_scales(scales: Tensor) -> Tensor:
    """Return stored scales [pieces, outputs, 4] uint8 of a checkpoint's [outputs, inputs / 32] uint8 (E8M0)."""
    outputs, num_blocks = scales.shape
    _, (pieces, _, _) = packed_shapes(outputs, num_blocks * BLOCK)
    padded = scales.new_zeros(outputs, pieces * _BYTES)
    padded[:, :num_blocks] = scales + SCALE_SHIFT
    return padded.view(outputs, pieces, _BYTES).transpose(0, 1)


def unpack_scales(stored: Tensor, inputs: int) -> Tensor:
    """Undo ``pack_scales``."""
    return stored.transpose(0, 1).flatten(1)[:, : inputs // BLOCK] - SCALE_SHIFT


def gates_first(x: Tensor) -> Tensor:
    """Return rows of x [outputs, …] with the even ones of each 16 before the odd ones."""
    rows: Tensor = x.unflatten(0, (-1, _PAIRS, 2))
    return rows.transpose(1, 2).flatten(0, 2)


def alternating(x: Tensor) -> Tensor:
    """Undo ``gates_first``."""
    rows: Tensor = x.unflatten(0, (-1, 2, _PAIRS))
    return rows.transpose(1, 2).flatten(0, 2)


def dequantized(words: Tensor, stored: Tensor, inputs: int) -> Tensor:
    """Return a weight [outputs, inputs] float32."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=words.device)
    scales = torch.exp2(unpack_scales(stored, inputs).float() - E8M0_BIAS)
    weight: Tensor = values[_codes(words, inputs).int()] * scales[:, :, None]
    return weight.flatten(1)


def _codes(words: Tensor, inputs: int) -> Tensor:
    """Return the codes of values [outputs, inputs / 32, 32] uint8: E2M1 in the low four bits."""
    a, b, c, d = ((words.int() >> shift) for shift in (6, 3, 0, 9))
    parts = a >> 6 & 8 | a & 7, b >> 6 & 8 | b & 7, c >> 6 & 8 | c & 7, d >> 2 & 8 | d & 6 | d >> 4 & 1
    codes = torch.stack(parts, 2).to(torch.uint8).transpose(0, 1).flatten(1)
    return codes[:, :inputs].view(len(codes), -1, BLOCK)
