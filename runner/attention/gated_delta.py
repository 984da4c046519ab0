"""The recurrent part of gated delta nets over the states of a rank: the interface, and plain torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kv.states import HeadStateSpec
from runner.attention.recurrent import ConvStep, Recurrent
from runner.batch import AttentionBatch, GatedDeltaWeights
from runner.kernels.gated_delta_reference import DeltaInputs, delta_rule_chunks, delta_rule_step, gates_of, normed
from runner.state_cache import StateCache


class GatedDelta(Recurrent):
    @abstractmethod
    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        """Return the output of the delta rule, [tokens, value_heads, value_dim]; advance the states of the sequences.

        mixed [tokens, channels]: queries, keys and values before the convolution, with rows at any stride. ba [tokens,
        2 * value_heads]: betas and decays. ``layer`` counts the recurrent layers of this rank from 0 on.
        """


@dataclass(frozen=True)
class _Step:
    conv: ConvStep
    slots: Tensor  # [num_seqs] int64
    singles: Tensor  # int64: sequences with one token
    single_tokens: Tensor  # int64: these tokens
    longer: tuple[_Row, ...]  # without drafts
    starts: NDArray[np.int64]  # [num_seqs + 1]: first token of each sequence
    drafted: NDArray[np.int64]  # sequences with drafts


class _Row(NamedTuple):
    """A sequence with several tokens. With a snapshot in their midst, these are two parts."""

    slot: int
    parts: tuple[tuple[slice, int], ...]  # tokens, and the slot of the state behind them


class _Between(NamedTuple):
    """Inputs and states of a layer, for sequences with drafts, until ``commit``."""

    inputs: Tensor  # [rows, channels]: history and inputs of the convolution, see ``ConvStep.convolve``
    states: list[Tensor]  # [drafted, …] each: the states after each of their tokens, the last one repeated


class TorchGatedDelta(GatedDelta):
    """The reference, on any device. Chunks of a prompt yield what the whole prompt does, up to rounding."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        assert isinstance(cache.layout.spec, HeadStateSpec)
        self._spec = cache.layout.spec
        self._step: _Step | None = None
        self._between: dict[int, _Between] = {}  # by layer

    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        assert batch.state_slots is not None
        device = self._cache.slots.device
        lengths = np.diff(batch.query_starts)
        singles = np.flatnonzero(lengths == 1)
        slots = batch.state_slots.cpu().numpy().astype(np.int64)
        starts = batch.query_starts.astype(np.int64)
        conv = ConvStep.of(batch, self._spec.conv_width, device)
        drafted = np.zeros(len(lengths), np.bool_)
        drafted[conv.drafted] = True
        self._between = {}
        snapshots = {snapshot.row: snapshot for snapshot in batch.state_snapshots}

        def longer(row: int) -> _Row:
            slot = int(slots[row])
            begin = int(starts[row])
            end = int(starts[row + 1])
            if (snapshot := snapshots.get(row)) is None:
                return _Row(slot, ((slice(begin, end), slot),))
            middle = begin + snapshot.tokens
            return _Row(slot, ((slice(begin, middle), snapshot.slot), (slice(middle, end), slot)))

        def to_device(values: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(values).to(device)

        self._step = _Step(
            conv=conv,
            slots=conv.slots,
            singles=to_device(singles),
            single_tokens=to_device(starts[singles]),
            longer=tuple(longer(int(row)) for row in np.flatnonzero((lengths > 1) & ~drafted)),
            starts=starts,
            drafted=conv.drafted,
        )

    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        step = self._step
        spec = self._spec
        assert step is not None, "plan comes first"
        convolved, conv_inputs = step.conv.convolve(self._cache.conv[layer], mixed, weights.conv, weights.conv_bias)
        inputs = self._inputs(F.silu(convolved), ba, weights)
        states = self._cache.delta[layer]
        out = mixed.new_empty(len(mixed), spec.value_heads, spec.value_dim)
        if len(step.singles):
            slots = step.slots[step.singles]
            results, advanced = self._one_token(inputs.of(step.single_tokens), states[slots], weights)
            out[step.single_tokens] = results.to(out.dtype)
            states[slots] = advanced
        for row in step.longer:
            state = states[row.slot]
            for tokens, slot in row.parts:
                results, state = self._tokens(inputs.of(tokens), state, weights)
                out[tokens] = results.to(out.dtype)
                states[slot] = state
        if len(step.drafted):
            self._between[layer] = _Between(conv_inputs, self._run_drafted(step, states, inputs, weights, out))
        return out

    def _inputs(self, convolved: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> DeltaInputs:
        q, k, v = self._heads(convolved)
        return DeltaInputs(normed(q), normed(k), v, *gates_of(ba, weights))

    def _one_token(self, inputs: DeltaInputs, state: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
        """Return the outputs and new states of one token of each of some sequences."""
        return delta_rule_step(inputs, state)

    def _tokens(self, inputs: DeltaInputs, state: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
        """Return the outputs and the new state of consecutive tokens of one sequence."""
        return delta_rule_chunks(inputs, state)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head, [tokens, value_heads, …]; key heads repeated for their values."""
        spec = self._spec
        q, k, v = convolved.split([spec.key_heads * spec.key_dim] * 2 + [spec.value_heads * spec.value_dim], dim=-1)
        group = spec.value_heads // spec.key_heads
        q, k = (rows.unflatten(-1, (spec.key_heads, spec.key_dim)).repeat_interleave(group, dim=1) for rows in (q, k))
        return q, k, v.unflatten(-1, (spec.value_heads, spec.value_dim))

    def commit(self, counts: Tensor) -> None:
        step = self._step
        assert step is not None, "run comes first"
        of_rows = counts.cpu().numpy()[step.drafted]
        device = counts.device
        slots = step.slots[torch.from_numpy(step.drafted).to(device)]
        for layer, between in self._between.items():
            step.conv.commit(self._cache.conv[layer], between.inputs, of_rows)
            for number, advanced in enumerate(between.states, start=1):
                chosen = torch.from_numpy(of_rows == number).to(device)
                self._cache.delta[layer][slots[chosen]] = advanced[chosen]
        self._between = {}

    def _run_drafted(
        self, step: _Step, states: Tensor, inputs: DeltaInputs, weights: GatedDeltaWeights, out: Tensor
    ) -> list[Tensor]:
        """Write the output of sequences with drafts, token after token. Return the states after each token."""
        device = out.device
        starts = step.starts[step.drafted]
        lengths = step.starts[step.drafted + 1] - starts
        state = states[step.slots[torch.from_numpy(step.drafted).to(device)]]
        new_states = []
        for number in range(lengths.max()):
            left = torch.from_numpy(np.flatnonzero(lengths > number)).to(device)
            tokens = torch.from_numpy(starts[lengths > number] + number).to(device)
            results, advanced = self._one_token(inputs.of(tokens), state[left], weights)
            out[tokens] = results.to(out.dtype)
            state = state.index_copy(0, left, advanced)
            new_states.append(state)
        return new_states
