"""The recurrent part of gated delta nets by Triton kernels.

Decode steps can be captured in CUDA graphs. Rows of padding have no tokens, so they change no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.state import NO_SLOT
from runner.attention.gated_delta import GatedDelta
from runner.batch import AttentionBatch, GatedDeltaWeights
from runner.kernels.gated_delta import convolve, delta_rule
from runner.kernels.gated_delta_chunks import DeltaChunks, chunk_delta_rule, to_device
from runner.state_cache import StateCache

MOST_SHORT = 8  # tokens of a row that is computed token after token: an estimate of what a chunk of 64 costs


@dataclass(frozen=True)
class _Step:
    slots: Tensor  # [rows] int32
    query_starts: Tensor  # [rows + 1] int32
    has_short: bool  # rows of at most MOST_SHORT tokens
    chunks: DeltaChunks | None  # of the longer rows
    snapshots: Tensor | None  # [rows, 2] int32, as kernels take them; None: every row has one token, or none


class TritonGatedDelta(GatedDelta):
    def __init__(self, cache: StateCache) -> None:
        self._cache, self._spec = cache, cache.layout.spec
        self._current: _Step | None = None

    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        assert batch.state_slots is not None
        lengths = np.diff(batch.query_starts)
        singles = not bool((lengths > 1).any())
        assert not graph or singles, "no graphs hold prompts of models with recurrent layers"
        device = batch.state_slots.device
        snapshots = np.full((len(lengths), 2), (0, NO_SLOT), dtype=np.int32)
        for row, tokens, slot in batch.state_snapshots:
            snapshots[row] = tokens, slot
        chunks = DeltaChunks.of(batch.query_starts, snapshots[:, 0], MOST_SHORT, device)
        self._current = _Step(
            slots=batch.state_slots,
            query_starts=batch.device_query_starts,
            has_short=chunks is None or bool((lengths <= MOST_SHORT).any()),
            chunks=chunks,
            snapshots=None if singles else to_device(snapshots, device),
        )

    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        step, spec, cache = self._current, self._spec, self._cache
        assert step is not None, "plan comes first"
        rows = step.slots, step.query_starts
        q, k, v = convolve(mixed, weights.conv, cache.conv[layer], *rows, step.snapshots, spec)
        states, out = cache.delta[layer], torch.empty_like(v)
        if step.has_short:
            delta_rule(q, k, v, ba, weights, states, *rows, step.snapshots, out, MOST_SHORT)
        if step.chunks is not None:
            assert step.snapshots is not None
            chunk_delta_rule(q, k, v, ba, weights, states, *rows, step.snapshots, out, step.chunks)
        return out
