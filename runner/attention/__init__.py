"""Attention over the paged KV cache: what a backend is given, and what it must do.

A backend takes the projected query, key and value heads of a layer, norms them (Qwen3), turns them by their position,
stores keys and values in the cache, and attends. It does all of that because the best way to cut this work into
kernels is what backends differ in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The tokens of one step. Sequence r owns tokens ``query_starts[r] … query_starts[r + 1] - 1``, the last of its
    ``seq_lens[r]`` tokens; all earlier ones are in the cache.

    A batch may be padded (for CUDA graphs): then the device's tensors have more rows than there are sequences, without
    tokens, and more tokens than sequences own, with slot -1. What attention yields for those is unspecified.
    """

    query_starts: NDArray[np.int32]  # [num_seqs + 1], host
    seq_lens: NDArray[np.int32]  # [num_seqs], host: tokens whose KV is there once this step's is stored
    device_query_starts: Tensor  # [rows + 1] int32, device
    device_seq_lens: Tensor  # [rows] int32, device
    page_table: (
        Tensor  # [rows, max_pages] int32, device; row stride may be larger; pages from position 0, then anything
    )
    slots: Tensor  # [tokens] int64, device: page * kernel_block_size + offset in the page; -1 stores nothing


@dataclass(frozen=True)
class RotaryCosSin:
    """What happens to query and key heads between projection and attention; the same for all layers of a step."""

    cos: Tensor  # [tokens, head_dim / 2] float32, device
    sin: Tensor  # [tokens, head_dim / 2] float32, device


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of every query and key head before they are turned (Qwen3).

    Weights that were read anew come in a new object, so that a backend may keep what it derives from them.
    """

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float


class AttentionBackend(Protocol):
    """``plan`` does the host's work once per step, ``run`` one layer's."""

    def plan(self, batch: AttentionBatch, graph: bool = False) -> None:
        """Prepare the next ``run`` calls.

        With ``graph`` ``run`` is being captured into a CUDA graph, or a captured one will be replayed, maybe with other
        lengths: what ``run`` reads must lie where it lay at the last such call with as many rows. Where a step with one
        token per sequence was captured, every replay is of such steps.
        """

    def run(self, layer: int, qkv: Tensor, turn: RotaryCosSin, norms: HeadNorms | None) -> Tensor:
        """One layer: [tokens, num_heads * head_dim] from qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim].

        The new keys and values are stored in the cache.
        """

    def store(self, layer: int, qkv: Tensor, turn: RotaryCosSin, norms: HeadNorms | None) -> None:
        """What ``run`` stores, where nobody needs what it returns."""
