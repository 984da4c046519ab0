"""Attention over the paged KV cache: what a backend is given, and what it must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The tokens of one step, on the host. Sequence r owns tokens ``query_starts[r] … query_starts[r + 1] - 1``."""

    positions: NDArray[np.int64]  # [num_tokens], consecutive within a sequence
    query_starts: NDArray[np.int64]  # [num_seqs + 1]
    page_table: NDArray[np.int32]  # [num_seqs, max_pages]: pages of each sequence from position 0 on, then anything


class AttentionBackend(Protocol):
    """``plan`` does the host's work once per step, ``run`` one layer's."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare index tensors and masks for the next ``run`` calls."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [num_tokens, num_kv_heads, head_dim] in the cache, attend, return [num_tokens, heads * head_dim].

        q is [num_tokens, num_heads, head_dim] and, like k, already turned by its position.
        """
