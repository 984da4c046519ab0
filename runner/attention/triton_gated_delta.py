"""The recurrent part of gated delta nets by Triton kernels, and by FlashInfer for prompts on Hopper.

Decode steps can be captured in CUDA graphs. Rows of padding have no tokens, so they change no state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.attention.gated_delta import GatedDelta
from runner.batch import AttentionBatch, GatedDeltaWeights
from runner.kernels.gated_delta import convolve, delta_rule, gates
from runner.placement import TensorPlacement
from runner.state_cache import StateCache

_log = logging.getLogger(__name__)

_CAPABILITY, _DIM = (9, 0), 128  # of FlashInfer's kernel for prompts
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Step:
    slots: Tensor  # [rows] int32
    query_starts: Tensor  # [rows + 1] int32
    singles: bool  # every row has one token, or none
    first_long: int  # rows before it are computed token after token
    first_token: int  # of these rows
    long_slots: Tensor | None  # [rows - first_long] int64
    long_starts: Tensor | None  # [rows - first_long + 1] int64, from 0


class TritonGatedDelta(GatedDelta):
    def __init__(self, cache: StateCache, placement: TensorPlacement, flashinfer: bool) -> None:
        """With ``flashinfer``, use FlashInfer for prompts if it has a kernel for these heads on this device."""
        self._cache, self._spec = cache, cache.layout.spec
        dims = {self._spec.key_dim, self._spec.value_dim}
        fits = flashinfer and dims == {_DIM} and placement.dtype in _DTYPES
        self._chunks = None
        if fits and torch.cuda.get_device_capability(placement.device) == _CAPABILITY:
            from runner.attention.flashinfer import FlashInferDeltaRule

            try:
                self._chunks = FlashInferDeltaRule()
            except (RuntimeError, OSError) as exc:  # it is compiled on first use
                _log.warning("prompts are slow: FlashInfer's gated delta rule cannot be built (%s)", exc)
        self._current: _Step | None = None

    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        assert batch.state_slots is not None
        lengths = np.diff(batch.query_starts)
        longer = np.flatnonzero(lengths > 1)
        assert not graph or not len(longer), "no graphs hold prompts of models with recurrent layers"
        first, first_token, long_slots, long_starts = len(batch.state_slots), 0, None, None
        if len(longer) and self._chunks is not None:
            first = int(longer[0])
            first_token = int(batch.query_starts[first])
            long_slots = batch.state_slots[first:].long()
            long_starts = batch.device_query_starts[first:].long() - first_token
        self._current = _Step(
            slots=batch.state_slots,
            query_starts=batch.device_query_starts,
            singles=not len(longer),
            first_long=first,
            first_token=first_token,
            long_slots=long_slots,
            long_starts=long_starts,
        )

    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        step, spec, cache = self._current, self._spec, self._cache
        assert step is not None, "plan comes first"
        singles = step.singles
        q, k, v = convolve(mixed, weights.conv, cache.conv[layer], step.slots, step.query_starts, spec, singles)
        states, out = cache.delta[layer], torch.empty_like(v)
        first = step.first_long
        if first:
            delta_rule(q, k, v, ba, weights, states, step.slots[:first], step.query_starts, out)
        if step.long_slots is not None and step.long_starts is not None:
            assert self._chunks is not None
            q, k, v, beta, alpha = (each[step.first_token :] for each in (q, k, v, *gates(ba, weights)))
            before, results = states.index_select(0, step.long_slots), out[step.first_token :]
            advanced = self._chunks.run(q, k, v, beta, alpha, before, step.long_starts, results)
            states.index_copy_(0, step.long_slots, advanced)
        return out
