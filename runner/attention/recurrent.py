"""The recurrent part of layers over the states of a rank: the interface of back ends, and the convolution in torch.

A back end of attention has one of them for the recurrent layers, and plans it with each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.batch import AttentionBatch


class Recurrent(ABC):
    """Runs ``plan`` once per step, then ``run``, which each kind of layer has for itself.

    The states of decodes with drafts stay as they are, as some drafts may be wrong. When the right ones are known,
    ``commit`` advances these states, before the next ``plan``:

        state s ── run: t d1 d2 d3 ──► outputs      commit: s ── t d1 ──► state, if d1 is right and d2 is not
    """

    @abstractmethod
    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        """Prepare the calls of one step; ``graph``: whether a CUDA graph has them (``AttentionBackend.plan``)."""

    @abstractmethod
    def commit(self, counts: Tensor) -> None:
        """Advance the states of all layers by the first counts[r] tokens of each row r with drafts.

        counts [rows] int64, device: at least 1, 0 for rows without drafts. Drafts belong to the last step.
        """


class ConvRows:
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


@dataclass(frozen=True)
class ConvStep:
    """The convolutions of one step in plain torch."""

    rows: ConvRows
    slots: Tensor  # [num_seqs] int64
    taps: Tensor  # [conv_width, tokens] int64: rows of history and inputs, one after the other
    history: Tensor  # [num_seqs * (conv_width - 1)] int64: the rows that become the new history
    drafted: NDArray[np.int64]  # sequences with drafts
    kept: Tensor  # int64: slots of snapshots
    kept_history: Tensor  # [snapshots * (conv_width - 1)] int64: their rows of history

    @classmethod
    def of(cls, batch: AttentionBatch, conv_width: int, device: torch.device) -> ConvStep:
        assert batch.state_slots is not None
        starts = batch.query_starts.astype(np.int64)
        lengths = np.diff(starts)
        rows = ConvRows(starts, conv_width - 1)
        drafted = np.zeros(len(lengths), np.bool_) if batch.drafted is None else batch.drafted.cpu().numpy() > 0
        kept = np.array(batch.state_snapshots, dtype=np.int64).reshape(-1, 3)

        def to_device(values: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            rows=rows,
            slots=to_device(batch.state_slots.cpu().numpy().astype(np.int64)),
            taps=to_device(rows.taps()),
            history=to_device(rows.history(np.arange(len(lengths)), np.where(drafted, 0, lengths))),
            drafted=np.flatnonzero(drafted),
            kept=to_device(kept[:, 2]),
            kept_history=to_device(rows.history(kept[:, 0], kept[:, 1])),
        )

    def convolve(self, states: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolution [tokens, channels] in float32, and its inputs; advance the states and snapshots.

        states: a layer's view of ``StateCache.conv``; x [tokens, channels]; weight [conv_width, channels]; bias
        [channels].
        """
        history = states[self.slots].mT.flatten(0, 1)  # [num_seqs * (conv_width - 1), channels]
        inputs = torch.cat((history, x.to(history.dtype)))  # rounded alike in this step and in later ones
        before = len(weight) - 1
        for slots, rows in ((self.kept, self.kept_history), (self.slots, self.history)):
            states[slots] = inputs[rows].unflatten(0, (len(slots), before)).mT
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for rows, tap in zip(self.taps, weight.float(), strict=True):
            total.addcmul_(inputs[rows].float(), tap)
        if bias is not None:
            total += bias.float()
        return total, inputs

    def commit(self, states: Tensor, inputs: Tensor, counts: NDArray[np.int64]) -> None:
        """Advance the states of sequences with drafts by counts[i] tokens of the i-th of ``drafted``.

        ``inputs`` is a result of ``convolve``.
        """
        slots = self.slots[torch.from_numpy(self.drafted).to(inputs.device)]
        history = torch.from_numpy(self.rows.history(self.drafted, counts)).to(inputs.device)
        states[slots] = inputs[history].unflatten(0, (len(slots), -1)).mT
