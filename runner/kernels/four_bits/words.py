"""The layout of 4-bit weights in memory, in plain torch: words of four codes, scales and zeros in pieces of 4 bytes.

A block is 64 inputs. Word j of an output's block has the codes of its inputs j, 16 + j, 32 + j, 48 + j, so each of the
four belongs to one group of 16 inputs, and a thread of a tensor core product finds its operands in its words. A mask
and a shift make numbers of bfloat16 of them:

    bit             15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    E2M1, value      0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2    2^-126 of the value
          part       s  s  m  s  e  e  s  e  e  m  e  e  m  e  e  m    sign, exponent, mantissa
    int4, value      3  3  3  3  2  2  2  2  1  1  1  1  0  0  0  0    beside the exponent of 128: 128 + code

The words of a block are stored together, output by output, so a tile of outputs is one piece of memory. Scales keep
their width: each piece has those of 4 bytes of an output, and a kernel reads it as one number. So do zeros, of a byte.
Scales of two bytes for a block or more are stored with their zeros, a group in each piece, and 8 where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # inputs
PART = 16  # inputs of a block that are at the same place of its words
WORDS = BLOCK // PART * 4  # words of an output in a block
PIECE = 4  # bytes of scales or zeros of an output that are stored together
ALL = 1 << 30  # inputs of a group that holds all, for kernels

E8M0_BIAS = 127
#: A stored E8M0 scale is an exponent of bfloat16: that of 2^110 times the scale. The other 2^16 might overflow.
E8M0_SHIFT = 110
LARGEST_E8M0 = 254 - E8M0_SHIFT
LARGEST_E4M3 = 0x7E  # the bits of 448; above are NaN and negative numbers
#: Bits of E4M3 numbers below 2^-6, with five bits of exponent as they are stored; others have 128 added.
_SMALL_E4M3 = (0, 112, 120, 124, 128, 130, 132, 134)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def blocks_of(inputs: int) -> int:
    """Return the number of blocks of an output; the last one may be filled up."""
    return -(-inputs // BLOCK)


def pieces_of(groups: int, width: int) -> int:
    """Return the pieces of an output's numbers of ``width`` bytes, one for each group."""
    return -(-groups * width // PIECE)


def pack_codes(codes: Tensor, e2m1: bool) -> Tensor:
    """Return words [blocks, outputs, WORDS] int16 of codes [outputs, inputs / 2] uint8, the even inputs in low bits."""
    outputs, bytes_per_output = codes.shape
    padded = codes.new_zeros(outputs, blocks_of(2 * bytes_per_output) * BLOCK)
    padded[:, : 2 * bytes_per_output : 2] = codes & 15
    padded[:, 1 : 2 * bytes_per_output : 2] = codes >> 4
    a, b, c, d = padded.view(outputs, -1, 4, PART).transpose(0, 1).to(torch.int16).unbind(2)
    if not e2m1:
        return a | b << 4 | c << 8 | d << 12
    words = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | (c & 7)
    return words | (d & 8) << 11 | (d & 6) << 9 | (d & 1) << 13


def unpack_codes(words: Tensor, inputs: int, e2m1: bool) -> Tensor:
    """Undo ``pack_codes``."""
    codes = separate_codes(words, inputs, e2m1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def separate_codes(words: Tensor, inputs: int, e2m1: bool) -> Tensor:
    """Return the codes [outputs, inputs] uint8 of words, each in the low four bits."""
    bits = words.int()
    if e2m1:
        first = bits >> 12 & 8 | bits >> 6 & 7
        second = bits >> 9 & 8 | bits >> 3 & 7
        third = bits >> 6 & 8 | bits & 7
        fourth = bits >> 11 & 8 | bits >> 9 & 6 | bits >> 13 & 1
        parts = first, second, third, fourth
    else:
        parts = bits & 15, bits >> 4 & 15, bits >> 8 & 15, bits >> 12 & 15
    return torch.stack(parts, 2).to(torch.uint8).transpose(0, 1).flatten(1)[:, :inputs]


def pack_pieces(numbers: Tensor) -> Tensor:
    """Return pieces [pieces, outputs] int32 of the bytes of numbers [outputs, groups], one to four bytes wide."""
    stored = torch.empty_like(numbers, memory_format=torch.contiguous_format).copy_(numbers).view(torch.uint8)
    outputs, size = stored.shape
    padded = stored.new_zeros(outputs, -(-size // PIECE) * PIECE)
    padded[:, :size] = stored
    return padded.view(torch.int32).t()


def unpack_pieces(pieces: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Undo ``pack_pieces``: return numbers [outputs, groups] in ``dtype``."""
    stored = pieces.new_empty(pieces.shape[1], pieces.shape[0]).copy_(pieces.t()).view(torch.uint8)
    size = groups * dtype.itemsize
    return stored.new_empty(len(stored), size).copy_(stored[:, :size]).view(dtype)


def pack_pairs(scales: Tensor, zeros: Tensor | int) -> Tensor:
    """Return pieces [groups, outputs] int32: a scale of two bytes of [outputs, groups], then its zero."""
    pieces = scales.new_empty(*scales.shape, 2, dtype=torch.int16)
    pieces[..., 0] = scales.contiguous().view(torch.int16)
    pieces[..., 1] = zeros
    return pieces.view(torch.int32).squeeze(-1).t()


def unpack_pairs(pieces: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Undo ``pack_pairs``: return scales in ``dtype`` and zeros uint8, both [outputs, groups]."""
    scales = (pieces << 16 >> 16).to(torch.int16).view(dtype).t()
    return scales, (pieces >> 16).to(torch.uint8).t()


def store_e4m3(scales: Tensor) -> Tensor:
    """Return E4M3 scales of at least 0 as they are stored: uint8, with five bits of exponent and three of mantissa.

    So all but 0 have the same form, and a kernel needs no arithmetic to make bfloat16 numbers of them.
    """
    bits = scales.view(torch.uint8)
    small = torch.tensor(_SMALL_E4M3, dtype=torch.uint8, device=bits.device)
    return torch.where(bits < len(_SMALL_E4M3), small[(bits & 7).int()], bits + 128)


def restore_e4m3(stored: Tensor) -> Tensor:
    """Undo ``store_e4m3``."""
    bits = stored - 128
    for index, small in enumerate(_SMALL_E4M3):
        bits = torch.where(stored == small, index, bits)
    return bits.to(torch.uint8).view(torch.float8_e4m3fn)


def values_of(codes: Tensor, e2m1: bool) -> Tensor:
    """Return the float32 values of codes; of int4 the codes themselves."""
    if not e2m1:
        return codes.float()
    return torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)[codes.int()]
