"""Tile sizes, warps and pipeline stages of the attention kernels on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from runner.kernels.device_limits import processors_of, shared_memory_of
from runner.placement import TensorPlacement

_KEY_TILE_BYTES = 16384  # bytes of keys, and as many of values, per pipeline stage
_SHORT_WINDOW = 512  # tokens; large tiles of keys would be masked for the most part
_LATENT_HEADS = 16  # most query heads of a program that attends to latents: its results fill the registers
_LARGE_SHARED_MEMORY = 160 << 10  # bytes a program may use; A100, H100 and their successors have it
_WIDE_HEAD = 256  # elements; tiles of wider heads are smaller
_MATRIX_ROWS = 16  # least rows of a tensor core product
_FEW = 4  # tokens of a decode with three drafts, or of a decode node's first step after a handoff
_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class AttentionTiles:
    """Launch options of the two kernels. Larger tiles than for single tokens hold a few tokens of a sequence."""

    processors: int
    few: int  # most tokens of a sequence in the tile ``several``
    decode: dict[str, Any]  # for sequences with one token
    several: dict[str, Any]  # for sequences with a few: ``decode`` where it holds them
    prefill: dict[str, Any]
    windowed: dict[str, Any]  # prefill in short windows

    def prefill_options(self, window: int | None) -> dict[str, Any]:
        """Return the options for a layer's window in tokens; BLOCK_QUERIES are the tokens of a tile."""
        return self.prefill if window is None or window > _SHORT_WINDOW else self.windowed


def choose_tiles(group: int, head_dim: int, placement: TensorPlacement) -> AttentionTiles:
    """Choose tiles for ``group`` query heads per key head, and products in the dtype of ``placement``."""
    device = placement.device
    large = shared_memory_of(device) >= _LARGE_SHARED_MEMORY
    exact = (
        placement.dtype == torch.float32
    )  # multiplied without tensor cores, out of registers: small tiles, no pipeline
    keys = min(max(_KEY_TILE_BYTES // (head_dim * placement.dtype.itemsize), 16), 128)
    # numpy, in which the interpreter multiplies, has no bfloat16.
    dot = tl.float32 if triton.knobs.runtime.interpret else _DOT[placement.dtype]
    block_group = triton.next_power_of_2(group)
    rows = 32 if exact else 128 if large and head_dim <= 128 else 64
    num_warps = 4
    num_stages = 3 if large else 2
    if head_dim > _WIDE_HEAD:  # as for latents: a program's results fill its registers. Not measured on a GPU yet
        rows = 16 if exact else 64 if large else 32
        keys = 32 if large and not exact else 16
        num_warps = 4 if exact else 8  # decodes with 4 spill 165 times on Hopper
        num_stages = 2 if large else 1
    windowed_rows = min(rows, 64)
    windowed_keys = min(keys, 32)
    common = {"BLOCK_KEYS": keys, "DOT": dot}
    decode = {
        **common,
        "BLOCK_GROUP": block_group,
        "BLOCK_ROWS": max(block_group, _MATRIX_ROWS),
        # On an H200 with 32 heads on 8 of 128 (bench/decode_attention.py): 2 warps are 2 to 8 % slower.
        "num_warps": num_warps,
        "num_stages": 1 if exact else num_stages if head_dim > _WIDE_HEAD else 3,
    }
    several = decode | {"BLOCK_ROWS": min(max(_FEW * block_group, _MATRIX_ROWS), max(rows, block_group))}
    return AttentionTiles(
        processors=processors_of(device),
        few=several["BLOCK_ROWS"] // block_group,
        decode=decode,
        several=several,
        # On an H200 in bfloat16 (ms for 8,192 tokens of gpt-oss, and of Llama 8B): 1.57 and 1.43, with 8 warps 2.08 and
        # 1.60. In a window of 128 tokens 0.13 ms, with the large tiles 0.26.
        prefill={
            **common,
            "BLOCK_GROUP": block_group,
            "BLOCK_QUERIES": max(rows // block_group, 1),
            "num_warps": num_warps,
            "num_stages": 1 if exact else num_stages,
        },
        windowed={
            **common,
            "BLOCK_GROUP": block_group,
            "BLOCK_QUERIES": max(windowed_rows // block_group, 1),
            "BLOCK_KEYS": windowed_keys,
            "num_warps": num_warps,
            "num_stages": 1 if exact else min(num_stages, 2),
        },
    )


def choose_latent_tiles(num_heads: int, placement: TensorPlacement) -> tuple[int, AttentionTiles]:
    """Return how many query heads share a program, and tiles of this group for latents of up to 512 values."""
    group = next(count for count in range(min(num_heads, _LATENT_HEADS), 0, -1) if num_heads % count == 0)
    exact = placement.dtype == torch.float32
    block_group = triton.next_power_of_2(group)
    rows = _MATRIX_ROWS if exact else 64
    common = {
        "BLOCK_GROUP": block_group,
        "BLOCK_KEYS": 16 if exact else 32,
        "DOT": tl.float32 if triton.knobs.runtime.interpret else _DOT[placement.dtype],
        "num_stages": 1 if exact else 2,
    }
    num_warps = 4 if exact else 8
    prefill = {**common, "BLOCK_QUERIES": max(rows // block_group, 1), "num_warps": num_warps}
    decode = {**common, "BLOCK_ROWS": _MATRIX_ROWS, "num_warps": 4}
    several = decode if rows == _MATRIX_ROWS else decode | {"BLOCK_ROWS": rows, "num_warps": num_warps}
    return group, AttentionTiles(
        processors=processors_of(placement.device),
        few=several["BLOCK_ROWS"] // block_group,
        decode=decode,
        several=several,
        prefill=prefill,
        windowed=prefill,
    )
