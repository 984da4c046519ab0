"""Products of tokens with the MXFP4 weights of their experts; the rows are those of ``grouped_tiles.py``.

Weights are dequantized in registers, and activations stay as they are. Weights are the left operand, which Hopper's
tensor cores take from registers. Sums are in float32, and so is the activation of gates and ups. The plain form is a
product with dequantized weights, and ``reference.clamped_swiglu``.

Hopper's tensor cores read these registers while the program goes on. Triton before 3.9 may write the next step's
weights to them too early (triton-lang/triton#9433), so there each step waits for its products.
``tests/runner/test_register_hazards.py`` reads the compiled kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.activation import clamped_swiglu_values
from runner.kernels.experts import mxfp4_words
from runner.kernels.experts.grouped_tiles import (
    DOT,
    GroupedRows,
    assignments_of_tile,
    expert_of_tile,
    group_rows,
    held_rows,
    tile_of_program,
)

_BFLOAT16 = tl.constexpr(tl.bfloat16)
_REST = tl.constexpr(2.0 ** (126 - mxfp4_words.SCALE_SHIFT))  # the part of a weight's scale that stored scales lack
_SHARED_TILES = 8  # tiles of rows whose programs share blocks of weights in the cache
_LEAST_ROWS = 8  # least rows of a tile, as a product's right operand

# Two words, and the scales of two columns in both blocks: the four values of each word, scaled.
_UNPACK = tl.constexpr("""{
.reg .b32 a, b, c, d, e, zero;
mov.b32 zero, 0x80008000;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 3;
and.b32 b, b, 0x81C081C0;
shl.b32 c, $4, 6;
and.b32 c, c, 0x81C081C0;
shl.b32 d, $4, 1;
and.b32 d, d, 0x80008000;
shr.b32 e, $4, 3;
and.b32 e, e, 0x01800180;
or.b32 d, d, e;
shr.b32 e, $4, 7;
and.b32 e, e, 0x00400040;
or.b32 d, d, e;
fma.rn.bf16x2 $0, a, $5, zero;
fma.rn.bf16x2 $1, b, $5, zero;
fma.rn.bf16x2 $2, c, $6, zero;
fma.rn.bf16x2 $3, d, $6, zero;
}""")


@triton.jit
def _dequantized(bits, exponents, DOT: tl.constexpr):
    """Return values in DOT of the bits of numbers 2^-126 times as large, and of stored exponents."""
    values = (bits << 16).to(tl.float32, bitcast=True) * (exponents << 23).to(tl.float32, bitcast=True)
    return (values * _REST).to(DOT)


@triton.jit
def _unpack(words, first, second, DOT: tl.constexpr):
    """Return the four values of each word [outputs, words]; bfloat16 values lack the factor _REST.

    ``first`` [outputs] int32 has the stored scales of values 0 and 1, ``second`` of 2 and 3.
    """
    if DOT == _BFLOAT16:
        first = (first << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = (second << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK,
            "=r,=r,=r,=r,r,r,r",
            [words, tl.broadcast_to(first[:, None], words.shape), tl.broadcast_to(second[:, None], words.shape)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        a = _dequantized(bits & 0x81C0, first[:, None], DOT)
        b = _dequantized((bits << 3) & 0x81C0, first[:, None], DOT)
        c = _dequantized((bits << 6) & 0x81C0, second[:, None], DOT)
        last = ((bits << 1) & 0x8000) | ((bits >> 3) & 0x180) | ((bits >> 7) & 0x40)
        d = _dequantized(last, second[:, None], DOT)
    return a, b, c, d


@triton.jit
def wait_for_products():
    """Wait until Hopper's tensor cores have read the registers of all products so far."""
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;",
        "=r,r",
        [tl.full([1], 0, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_group(
    total,  # [BLOCK_OUT, rows]
    words_at,  # [BLOCK_OUT, WORDS], of the first group
    scales_at,  # [BLOCK_OUT]
    x_at,  # [4 * WORDS, rows]
    group,
    inside,  # [BLOCK_OUT]
    held,  # [4 * WORDS or 1, rows]
    OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WORDS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the products of a group of inputs."""
    words = tl.load(words_at + group * (OUT * WORDS), mask=inside[:, None], other=0)
    scales = tl.load(scales_at + group // 2 * OUT, mask=inside, other=0) >> (group % 2 * 16)
    a, b, c, d = _unpack(words, scales & 0xFF, (scales >> 8) & 0xFF, DOT)
    weights = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    values = tl.load(x_at + group * (4 * WORDS), mask=held, other=0.0)
    return tl.dot(tl.reshape(weights, (BLOCK_OUT, 4 * WORDS)), values.to(DOT), total, input_precision="ieee")


@triton.jit
def _clamped_swiglu(pairs, alpha, limit, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Return activations [OUT / 2, ROWS] of gates and ups [OUT, ROWS] in the order of ``mxfp4_words.gates_first``."""
    pairs = tl.permute(tl.reshape(pairs, (OUT // 16, 2, 8, ROWS)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    return tl.reshape(clamped_swiglu_values(gate, up, alpha, limit), (OUT // 2, ROWS))


@triton.jit
def _multiply_tile(
    x,
    words,
    scales,
    bias,
    y,
    assignment,  # [rows] of the tile
    expert,  # number on this rank
    out_block,
    count,
    alpha,
    limit,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNROLL: tl.constexpr,
    WAITS: tl.constexpr,
    WORDS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Write a block of outputs of a tile, or if GATED their activations."""
    ROWS: tl.constexpr = assignment.shape[0]
    NUM_GROUPS: tl.constexpr = (IN + 4 * WORDS - 1) // (4 * WORDS)
    FULL: tl.constexpr = IN // (4 * WORDS)  # groups
    LOOPED: tl.constexpr = FULL // UNROLL * UNROLL
    held, rows = held_rows(assignment, count)
    out = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = out < OUT
    column = tl.arange(0, 4 * WORDS)
    stack = expert.to(tl.int64) * OUT
    words_at = words + stack * (NUM_GROUPS * WORDS) + out[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    scales_at = scales + stack * ((NUM_GROUPS + 1) // 2) + out
    x_at = x + (rows // ROWS_PER_TOKEN)[None, :] * IN + column[:, None]
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for begin in range(0, LOOPED, UNROLL):
        for part in tl.static_range(UNROLL):
            total = _add_group(
                total, words_at, scales_at, x_at, begin + part, inside, held[None, :], OUT, BLOCK_OUT, WORDS, DOT
            )
        if WAITS:
            wait_for_products()
    for group in tl.static_range(LOOPED, NUM_GROUPS):
        within = (column < IN - group * (4 * WORDS))[:, None]
        total = _add_group(
            total, words_at, scales_at, x_at, group, inside, held[None, :] & within, OUT, BLOCK_OUT, WORDS, DOT
        )
    if DOT == _BFLOAT16:
        total = total * _REST
    number = out // 16 * 16 + out % 8 * 2 + out // 8 % 2 if GATED else out  # in the checkpoint
    total += tl.load(bias + stack + number, mask=inside, other=0.0).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = OUT // 2 if GATED else OUT
    if GATED:
        total = _clamped_swiglu(total, alpha, limit, BLOCK_OUT, ROWS)
        out = out_block * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
    y_at = y + rows[None, :] * WIDTH + out[:, None]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=held[None, :] & (out < WIDTH)[:, None])


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts", "tiles"])
def _grouped_mxfp4_kernel(
    x,  # [count / ROWS_PER_TOKEN, IN]
    words,  # [num_experts, groups, OUT, WORDS] int16
    scales,  # [num_experts, groups / 2, OUT] int32, four scales each
    bias,  # [num_experts, OUT]
    y,  # out [count, OUT], or [count, OUT / 2] if GATED
    assignments,  # [tiles * BLOCK_ROWS] int32, read if SORTED
    experts,  # [tiles] int32
    count,
    first_expert,  # this rank's first expert, for ``experts`` if not SORTED
    num_experts,
    tiles,
    alpha,  # parameter of the activation, if GATED
    limit,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,  # outputs are gates and ups in the order of ``mxfp4_words.gates_first``
    ROWS_PER_TOKEN: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FEW_ROWS: tl.constexpr,  # sorted tiles with at most this many rows are multiplied as smaller ones; 0: none are
    BLOCK_OUT: tl.constexpr,
    TOGETHER: tl.constexpr,
    UNROLL: tl.constexpr,  # groups of inputs in a step
    WAITS: tl.constexpr,
    WORDS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (tiles * blocks of OUT,). Programs of TOGETHER tiles share blocks of weights in the cache."""
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    tile, out_block = tile_of_program(tiles, OUT_BLOCKS, TOGETHER)
    expert, has_expert = expert_of_tile(experts, tile, first_expert, num_experts, SORTED)
    if has_expert:
        first_row = assignments + tile * BLOCK_ROWS
        if FEW_ROWS == 0 or tl.load(first_row + FEW_ROWS) < count:
            assignment = assignments_of_tile(assignments, tile, count, SORTED, BLOCK_ROWS)
            _multiply_tile(
                x, words, scales, bias, y, assignment, expert, out_block, count, alpha, limit,
                IN, OUT, GATED, ROWS_PER_TOKEN, BLOCK_OUT, UNROLL, WAITS, WORDS, DOT,
            )  # fmt: skip
        else:
            few = tl.load(first_row + tl.arange(0, FEW_ROWS))
            _multiply_tile(
                x, words, scales, bias, y, few, expert, out_block, count, alpha, limit,
                IN, OUT, GATED, ROWS_PER_TOKEN, BLOCK_OUT, UNROLL, WAITS, WORDS, DOT,
            )  # fmt: skip


def compiler_problem(capability: tuple[int, int], version: str) -> str:
    """Say why a Triton version compiles no right product for a GPU; empty if it does."""
    if capability < (10, 0) or _release(version) >= (3, 9):
        return ""
    return (
        f"Triton {version} compiles products of MXFP4 experts to nothing for GPUs of compute capability "
        f"{capability[0]}.{capability[1]}; install Triton 3.9 or choose V1"
    )


def overwrites_operands(capability: tuple[int, int], version: str) -> bool:
    """Whether each step must wait for its products with this Triton version, as the module says."""
    return capability == (9, 0) and _release(version) < (3, 9)


@functools.cache
def must_wait() -> bool:
    """Whether steps must wait for their products with this GPU and compiler."""
    return not triton.knobs.runtime.interpret and overwrites_operands(
        torch.cuda.get_device_capability(), triton.__version__
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


class ClampedSwiGLU(NamedTuple):
    """The activation of ``reference.clamped_swiglu``."""

    alpha: float
    limit: float


def grouped_mxfp4(
    x: Tensor, words: Tensor, scales: Tensor, bias: Tensor, rows: GroupedRows, activation: ClampedSwiGLU | None = None
) -> Tensor:
    """Return the product of each assignment, [tokens * top_k, out_features]; undefined for other ranks' experts.

    With an ``activation``, words and scales have the order of ``mxfp4_words.gates_first``, and the result is the
    activation of gates and ups, [tokens * top_k, out_features / 2].

    x is [tokens, in_features], or [tokens * top_k, in_features] with a row per assignment. This rank's experts
    have words [experts, groups, out_features, 16] and scales [experts, groups / 2, out_features, 4] of
    ``mxfp4_words.py``, and bias [experts, out_features]. ``rows`` come from ``rows_of_experts``.
    """
    assert x.is_contiguous()
    assert words.is_contiguous()
    assert scales.is_contiguous()
    count = rows.num_assignments
    in_features = x.shape[1]
    out_features = words.shape[2]
    assert activation is None or out_features % 16 == 0
    y = x.new_empty(count, out_features if activation is None else out_features // 2)
    if not count:
        return y
    options = _options(rows.tile_rows, x.dtype)
    _grouped_mxfp4_kernel[(rows.tiles * triton.cdiv(out_features, options["BLOCK_OUT"]),)](
        x,
        words,
        scales.view(torch.int32),
        bias,
        y,
        rows.assignments,
        rows.tile_experts,
        count,
        rows.local.start,
        len(rows.local),
        rows.tiles,
        *(activation or ClampedSwiGLU(0.0, 0.0)),
        IN=in_features,
        OUT=out_features,
        GATED=activation is not None,
        ROWS_PER_TOKEN=count // x.shape[0],
        SORTED=rows.tokens is not None,
        BLOCK_ROWS=rows.tile_rows,
        WAITS=must_wait(),
        WORDS=mxfp4_words.WORDS,
        **options,
    )
    return y


def rows_of_experts(experts: Tensor, local: range) -> GroupedRows:
    """Return the rows of the products of experts [tokens, top_k] int32; ``local`` are this rank's experts.

    An H200 multiplies a tile of 64 rows and a smaller one faster than a tile of 128 that is not full.
    """
    return group_rows(experts, local, _LEAST_ROWS, 64 if experts.numel() <= 96 * len(local) else 128)


def _options(tile_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile sizes: few rows read weights, many rows compute."""
    # numpy, in which the interpreter multiplies, has no bfloat16.
    if triton.knobs.runtime.interpret:
        few_rows = tile_rows // 4 if tile_rows > 32 else 0
        return {"BLOCK_OUT": 128, "FEW_ROWS": few_rows, "UNROLL": 2, "TOGETHER": 1, "DOT": tl.float32}
    if dtype == torch.float32:  # multiplied without tensor cores, out of registers: small tiles
        options = {"BLOCK_OUT": 32, "FEW_ROWS": 0, "UNROLL": 1, "TOGETHER": 1, "num_stages": 2}
    elif tile_rows <= 32:
        options = {"BLOCK_OUT": 128, "FEW_ROWS": 0, "UNROLL": 2, "TOGETHER": 1, "num_stages": 3}
    else:
        stages = 4 if tile_rows == 64 else 3  # two programs of 128 rows fit into a processor of Hopper
        options = {
            "BLOCK_OUT": 128,
            "FEW_ROWS": tile_rows // 4,
            "UNROLL": 1,
            "TOGETHER": _SHARED_TILES,
            "num_stages": stages,
        }
    return options | {"num_warps": 4, "DOT": DOT[dtype]}
