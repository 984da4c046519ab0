"""Short convolutions by Triton kernels.

Decode steps can be captured in CUDA graphs. Rows of padding have no tokens, so they change no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kv.states import NO_SLOT, ShortConvSpec
from runner.attention.short_conv import ShortConv
from runner.batch import AttentionBatch, ShortConvWeights
from runner.kernels.gated_delta import store_history
from runner.kernels.short_conv import short_conv
from runner.state_cache import StateCache


@dataclass(frozen=True)
class _Step:
    slots: Tensor  # [rows] int32
    query_starts: Tensor  # [rows + 1] int32
    drafted: Tensor | None  # [rows] int32, see AttentionBatch
    snapshots: Tensor | None  # [rows, 2] int32, as kernels take them; None: no row has one


class TritonShortConv(ShortConv):
    """Keeps the inputs of decodes with drafts for ``commit``."""

    def __init__(self, cache: StateCache, max_num_seqs: int = 0, max_drafts: int = 0) -> None:
        """A step has at most ``max_num_seqs`` decodes, of ``max_drafts`` drafts each."""
        spec = cache.layout.spec
        assert isinstance(spec, ShortConvSpec)
        self._cache = cache
        self._spec = spec
        self._current: _Step | None = None
        self._capacity = max_num_seqs * (1 + max_drafts) if max_drafts else 0  # decodes are the first tokens of a step
        dtype = getattr(torch, spec.dtype)
        self._kept = [
            torch.zeros(self._capacity, spec.channels, dtype=dtype, device=cache.slots.device)
            for _ in range(cache.layout.num_layers)
        ]

    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        assert batch.state_slots is not None
        snapshots: Tensor | None = None
        if batch.state_snapshots:
            assert not graph, "a graph stores no snapshots"
            table = np.full((len(batch.query_starts) - 1, 2), (0, NO_SLOT), dtype=np.int32)
            for row, tokens, slot in batch.state_snapshots:
                table[row] = tokens, slot
            snapshots = torch.from_numpy(table).to(batch.state_slots.device)
        self._current = _Step(batch.state_slots, batch.device_query_starts, batch.drafted, snapshots)

    def run(self, layer: int, x: Tensor, weights: ShortConvWeights) -> Tensor:
        step = self._step
        history = self._cache.conv[layer]
        rows = step.slots, step.query_starts
        out = short_conv(x, weights, history, *rows)
        store_history(x, history, *rows, step.query_starts[1:], self._spec, step.snapshots, step.drafted)
        if step.drafted is not None:
            kept = self._kept[layer]
            count = min(len(x), self._capacity)
            kept[:count].copy_(x[:count])
        return out

    def commit(self, counts: Tensor) -> None:
        step = self._step
        starts = step.query_starts
        ends = starts[:-1] + counts.int()
        for kept, history in zip(self._kept, self._cache.conv, strict=True):
            store_history(kept, history, step.slots, starts, ends, self._spec)

    @property
    def _step(self) -> _Step:
        assert self._current is not None, "plan comes first"
        return self._current
