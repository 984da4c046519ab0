"""The recurrent part of gated delta nets over the states of a rank: the interface, and plain torch.

A back end of attention has one of them for the recurrent layers, and plans it with each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from runner.batch import AttentionBatch, GatedDeltaWeights
from runner.kernels.gated_delta_reference import DeltaInputs, delta_rule_chunks, delta_rule_step, gates_of, normed
from runner.state_cache import StateCache


class GatedDelta(ABC):
    """Runs ``plan`` once per step, then ``run`` for each recurrent layer.

    The states of decodes with drafts stay as they are, as some drafts may be wrong. When the right ones are known,
    ``commit`` advances these states, before the next ``plan``:

        state s ── run: t d1 d2 d3 ──► outputs      commit: s ── t d1 ──► state, if d1 is right and d2 is not
    """

    @abstractmethod
    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        """Prepare the calls of one step; ``graph``: whether a CUDA graph has them (``AttentionBackend.plan``)."""

    @abstractmethod
    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        """Return the output of the delta rule, [tokens, value_heads, value_dim]; advance the states of the sequences.

        mixed [tokens, channels]: queries, keys and values before the convolution, with rows at any stride. ba [tokens,
        2 * value_heads]: betas and decays. ``layer`` counts the recurrent layers of this rank from 0 on.
        """

    @abstractmethod
    def commit(self, counts: Tensor) -> None:
        """Advance the states of all layers by the first counts[r] tokens of each row r with drafts.

        counts [rows] int64, device: at least 1, 0 for rows without drafts. Drafts belong to the last step.
        """


@dataclass(frozen=True)
class _Step:
    slots: Tensor  # [num_seqs] int64
    taps: Tensor  # [conv_width, tokens] int64: rows of history and inputs, one after the other
    history: Tensor  # [num_seqs * (conv_width - 1)] int64: the rows that become the new history
    singles: Tensor  # int64: sequences with one token
    single_tokens: Tensor  # int64: these tokens
    longer: tuple[_Row, ...]  # without drafts
    drafted: NDArray[np.int64]  # sequences with drafts
    rows: _ConvRows
    kept: Tensor  # int64: slots of snapshots
    kept_history: Tensor  # [snapshots * (conv_width - 1)] int64: their rows of history


class _Row(NamedTuple):
    """A sequence with several tokens. With a snapshot in their midst, these are two parts."""

    slot: int
    parts: tuple[tuple[slice, int], ...]  # tokens, and the slot of the state behind them


class _Between(NamedTuple):
    """Inputs and states of a layer, for sequences with drafts, until ``commit``."""

    inputs: Tensor  # [rows, channels]: history and inputs of the convolution, see ``_ConvRows``
    states: list[Tensor]  # [drafted, …] each: the states after each of their tokens, the last one repeated


class TorchGatedDelta(GatedDelta):
    """The reference, on any device. Chunks of a prompt yield what the whole prompt does, up to rounding."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
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
        rows = _ConvRows(starts, self._spec.conv_width - 1)
        drafted = np.zeros(len(lengths), np.bool_) if batch.drafted is None else batch.drafted.cpu().numpy() > 0
        self._between = {}
        kept = np.array(batch.state_snapshots, dtype=np.int64).reshape(-1, 3)
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
            slots=to_device(slots),
            taps=to_device(rows.taps()),
            history=to_device(rows.history(np.arange(len(lengths)), np.where(drafted, 0, lengths))),
            singles=to_device(singles),
            single_tokens=to_device(starts[singles]),
            longer=tuple(longer(int(row)) for row in np.flatnonzero((lengths > 1) & ~drafted)),
            drafted=np.flatnonzero(drafted),
            rows=rows,
            kept=to_device(kept[:, 2]),
            kept_history=to_device(rows.history(kept[:, 0], kept[:, 1])),
        )

    def run(self, layer: int, mixed: Tensor, ba: Tensor, weights: GatedDeltaWeights) -> Tensor:
        step = self._step
        spec = self._spec
        assert step is not None, "plan comes first"
        convolved, conv_inputs = self._convolve(step, layer, mixed, weights)
        inputs = self._inputs(convolved, ba, weights)
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
        history = torch.from_numpy(step.rows.history(step.drafted, of_rows)).to(device)
        for layer, between in self._between.items():
            self._cache.conv[layer][slots] = between.inputs[history].unflatten(0, (len(slots), -1)).mT
            for number, advanced in enumerate(between.states, start=1):
                chosen = torch.from_numpy(of_rows == number).to(device)
                self._cache.delta[layer][slots[chosen]] = advanced[chosen]
        self._between = {}

    def _run_drafted(
        self, step: _Step, states: Tensor, inputs: DeltaInputs, weights: GatedDeltaWeights, out: Tensor
    ) -> list[Tensor]:
        """Write the output of sequences with drafts, token after token. Return the states after each token."""
        device = out.device
        starts = step.rows.starts[step.drafted]
        lengths = step.rows.starts[step.drafted + 1] - starts
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

    def _convolve(self, step: _Step, layer: int, mixed: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
        """Return silu of the convolution [tokens, channels] in float32, and its inputs; advance its state."""
        states = self._cache.conv[layer]
        history = states[step.slots].mT.flatten(0, 1)  # [num_seqs * (conv_width - 1), channels]
        inputs = torch.cat((history, mixed.to(history.dtype)))  # rounded alike in this step and in later ones
        before = self._spec.conv_width - 1
        for slots, rows in ((step.kept, step.kept_history), (step.slots, step.history)):
            states[slots] = inputs[rows].unflatten(0, (len(slots), before)).mT
        total = torch.zeros(mixed.shape, dtype=torch.float32, device=mixed.device)
        if weights.conv_bias is not None:
            total += weights.conv_bias
        for rows, tap in zip(step.taps, weights.conv.float(), strict=True):
            total.addcmul_(inputs[rows].float(), tap)
        return F.silu(total), inputs


class _ConvRows:
    """Rows of the inputs of a convolution: the ``before`` of history of each sequence, then the tokens of all."""

    def __init__(self, query_starts: NDArray[np.int64], before: int) -> None:
        self.starts = query_starts
        self._before = before

    def taps(self) -> NDArray[np.int64]:
        """Return the rows that each tap reads: [before + 1, tokens]."""
        seqs = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        local = np.arange(self.starts[-1]) - self.starts[seqs]  # index of a token in its sequence's part
        return np.stack([self._rows(seqs, local - back) for back in range(self._before, -1, -1)])

    def history(self, seqs: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that are the history after so many tokens of these sequences: [len(seqs) * before]."""
        back = np.tile(np.arange(-self._before, 0), len(seqs))
        return self._rows(np.repeat(seqs, self._before), np.repeat(tokens, self._before) + back)

    def _rows(self, seqs: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
        of_tokens = (len(self.starts) - 1) * self._before + self.starts[seqs] + index
        return np.where(index < 0, (seqs + 1) * self._before + index, of_tokens)
