"""The recurrent part of gated delta nets by Triton kernels.

Decode steps can be captured in CUDA graphs. Rows of padding have no tokens, so they change no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.kv.states import NO_SLOT, HeadStateSpec
from runner.attention.gated_delta import GatedDelta
from runner.batch import AttentionBatch, GatedDeltaWeights
from runner.kernels.gated_delta import convolve, delta_rule, store_history
from runner.kernels.gated_delta_chunks import DeltaChunks, chunk_delta_rule, to_device
from runner.state_cache import StateCache

MOST_SHORT = 8  # tokens of a row that is computed token after token: an estimate of what a chunk of 64 costs
# Least values of a head in 16 bits that chunks compute: with 16, an H100 reports an illegal memory access.
_LEAST_DIM = 64


class HeadInputs(NamedTuple):
    """Inputs of a step behind the convolution."""

    q: Tensor  # [tokens, key_heads, key_dim]
    k: Tensor  # [tokens, key_heads, key_dim]
    v: Tensor  # [tokens, value_heads, value_dim]
    gates: Tensor  # [tokens, gates_per_head * value_heads]


@dataclass(frozen=True)
class _Step:
    slots: Tensor  # [rows] int32
    query_starts: Tensor  # [rows + 1] int32
    drafted: Tensor | None  # [rows] int32, see AttentionBatch
    has_short: bool  # rows of few tokens
    chunks: DeltaChunks | None  # chunks of the longer rows; None: no such row
    snapshots: Tensor | None  # [rows, 2] int32, as kernels take them; None: every row has one token, or none


class TritonGatedDelta(GatedDelta):
    """Keeps the inputs of decodes with drafts for ``commit``: the states after each would take far more memory."""

    gates_per_head = 2  # betas and decays
    normed = True  # queries and keys have length 1

    def __init__(self, cache: StateCache, max_num_seqs: int = 0, max_drafts: int = 0) -> None:
        """A step has at most ``max_num_seqs`` decodes, of ``max_drafts`` drafts each."""
        self._cache = cache
        assert isinstance(cache.layout.spec, HeadStateSpec)
        self._spec = cache.layout.spec
        by_chunks = self._spec.dtype == "float32" or min(self._spec.key_dim, self._spec.value_dim) >= _LEAST_DIM
        self._most_short = max(MOST_SHORT, 1 + max_drafts) if by_chunks else 1 << 30
        self._current: _Step | None = None
        spec = self._spec
        device = cache.slots.device
        self._capacity = max_num_seqs * (1 + max_drafts) if max_drafts else 0  # decodes are the first tokens of a step
        sizes = (
            (spec.channels,),
            (spec.key_heads, spec.key_dim),
            (spec.value_heads, spec.value_dim),
            (self.gates_per_head * spec.value_heads,),
        )
        # By layer: inputs of the convolution, keys, values, betas and decays.
        self._kept = [
            [torch.zeros(self._capacity, *size, dtype=getattr(torch, spec.dtype), device=device) for size in sizes]
            for _ in range(cache.layout.num_layers)
        ]
        self._weights: dict[int, GatedDeltaWeights] = {}  # by layer
        self._no_snapshots = torch.tensor([(0, NO_SLOT)] * max_num_seqs, dtype=torch.int32, device=device)

    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        assert batch.state_slots is not None
        lengths = np.diff(batch.query_starts)
        device = batch.state_slots.device
        table = np.full((len(lengths), 2), (0, NO_SLOT), dtype=np.int32)
        for row, tokens, slot in batch.state_snapshots:
            table[row] = tokens, slot
        chunks = DeltaChunks.of(batch.query_starts, table[:, 0], self._most_short, device)
        snapshots: Tensor | None = None
        if graph:
            assert chunks is None, "no graphs hold prompts of models with recurrent layers"
            assert not batch.state_snapshots, "a graph stores no snapshots"
        if (lengths > 1).any():
            snapshots = self._no_snapshots[: len(batch.state_slots)] if graph else to_device(table, device)
        self._current = _Step(
            slots=batch.state_slots,
            query_starts=batch.device_query_starts,
            drafted=batch.drafted,
            has_short=chunks is None or bool((lengths <= self._most_short).any()),
            chunks=chunks,
            snapshots=snapshots,
        )

    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        step = self._step
        spec = self._spec
        cache = self._cache
        rows = step.slots, step.query_starts, step.snapshots
        history = cache.conv[layer]
        q, k, v = convolve(mixed, weights.conv, history, *rows, spec, step.drafted, weights.conv_bias, self.normed)
        out = torch.empty_like(v)
        inputs = HeadInputs(q, k, v, ba)
        states = cache.delta[layer]
        if step.has_short:
            self._advance(inputs, weights, states, rows, out, drafted=step.drafted)
        if step.chunks is not None:
            assert step.snapshots is not None
            of_chunks = step.slots, step.query_starts, step.snapshots
            self._advance_chunks(inputs, weights, states, of_chunks, out, step.chunks)
        if step.drafted is not None:
            self._weights[layer] = weights
            for kept, values in zip(self._kept[layer], (mixed, k, v, ba), strict=True):
                count = min(len(values), self._capacity)
                kept[:count].copy_(values[:count])
        return out

    def commit(self, counts: Tensor) -> None:
        step = self._step
        cache = self._cache
        starts = step.query_starts
        ends = starts[:-1] + counts.int()
        for layer, weights in self._weights.items():
            mixed, k, v, ba = self._kept[layer]
            store_history(mixed, cache.conv[layer], step.slots, starts, ends, self._spec)
            rows = step.slots, starts, None
            self._advance(HeadInputs(k, k, v, ba), weights, cache.delta[layer], rows, None, ends)

    def _advance(
        self,
        inputs: HeadInputs,
        weights: GatedDeltaWeights,
        states: Tensor,
        rows: tuple[Tensor, Tensor, Tensor | None],
        out: Tensor | None,
        ends: Tensor | None = None,
        drafted: Tensor | None = None,
    ) -> None:
        """Compute rows of few tokens; ``rows`` are their slots, their first tokens and the snapshots."""
        delta_rule(*inputs, weights, states, *rows, out, self._most_short, ends, drafted)

    def _advance_chunks(
        self,
        inputs: HeadInputs,
        weights: GatedDeltaWeights,
        states: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        chunks: DeltaChunks,
    ) -> None:
        """Compute rows of many tokens."""
        chunk_delta_rule(*inputs, weights, states, *rows, out, chunks)

    @property
    def _step(self) -> _Step:
        assert self._current is not None, "plan comes first"
        return self._current
