"""Drafts by the model itself, made behind the step that samples; the engine's DraftSource is ``ModelDrafts``.

The predictor (runner/models/layers/token_predictor.py) takes all tokens of each step, one position later, so that it
has keys and values for every position. Further drafts are a row per sequence each:

    step     t0 t1 t2 ─► samples t3       predictor at positions 0 1 2: t1 t2 t3 ─► d4
    behind                                predictor at position 3: d4 ─► d5, at position 4: d5 ─► d6

The next step of the sequence overwrites what the predictor stored for drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import AttentionBatch
from runner.models.model import Model
from runner.models.vision.inputs import NoImageInputs


@dataclass(frozen=True)
class PredictedTokens:
    """The inputs of the predictor for the tokens of a step."""

    next_ids: Tensor  # [tokens], device: the token behind each; any one behind rejected drafts
    hidden: Tensor  # [tokens, hidden_size], device
    positions: Tensor  # [tokens], device


@dataclass(frozen=True)
class DraftRows:
    """The sequences that have sampled, with a row each. A batch for a CUDA graph may have rows of padding behind them.

    Such a row has any ``last`` token, and a limit of 1.
    """

    last: Tensor  # [rows] int64, device: the last token without rejected drafts, among those of the step
    starts: Tensor  # [rows + 1] int32, device: 0, 1, 2 …; without a further token for rows of padding
    page_table: Tensor  # [rows, max_pages] int32, device: pages from position 0
    limits: NDArray[np.int64]  # [rows], host: tokens that have a page
    device_limits: Tensor  # [rows] int64, device: tokens that have a page
    seq_lens: NDArray[np.int64]  # [rows], host: tokens in the cache with the last one; at least, if the device knows


class Drafter:
    def __init__(self, model: Model, images: NoImageInputs, backend: AttentionBackend, page_size: int) -> None:
        """``images`` are the model's. Drafts behind images have exact positions; those amid one have its times."""
        self._model = model
        self._images = images
        self._backend = backend
        self._page_size = page_size

    def store(self, tokens: PredictedTokens) -> None:
        """Store keys and values of a step without drafts behind it. ``backend`` has planned the step."""
        nothing = tokens.positions[:0]
        hidden = self._model.draft_inputs(tokens.hidden)
        self._model.predict(tokens.next_ids, hidden, self._images.times(tokens.positions), self._backend, nothing)

    def draft(self, tokens: PredictedTokens, rows: DraftRows, count: int, graph: bool = False) -> Tensor:
        """Do ``store``, and return the next ``count`` drafts of each row: [rows, count] int32, device.

        They are the most likely tokens. Host and device do not wait for each other. With ``graph`` the call is captured
        into a CUDA graph: then the arrays of ``rows`` on the host have the right sizes, and any values.
        """
        hidden = self._model.draft_inputs(tokens.hidden)
        times = self._images.times(tokens.positions)
        result = self._model.predict(tokens.next_ids, hidden, times, self._backend, rows.last)
        position = tokens.positions.index_select(0, rows.last)
        drafts = [self._model.likeliest(result)]
        for number in range(1, count):
            held = torch.minimum(position + number, rows.device_limits - 1)
            batch = self._batch(rows, held, position + number < rows.device_limits, number)
            self._backend.plan(batch, graph=1 if graph else 0)
            times = self._images.times_behind(held, rows.last)
            result = self._model.predict(drafts[-1], result, times, self._backend)
            drafts.append(self._model.likeliest(result))
        return torch.stack(drafts, dim=1).int()

    def _batch(self, rows: DraftRows, positions: Tensor, stored: Tensor, number: int) -> AttentionBatch:
        """Return a step of one token per row. Tokens that are not ``stored`` see what is at their position."""
        count = len(rows.seq_lens)
        page_size = self._page_size
        pages = rows.page_table.gather(1, (positions // page_size)[:, None])[:, 0]
        slots = (pages.long() * page_size + positions % page_size).masked_fill(~stored, -1)
        starts = np.arange(count + 1, dtype=np.int32)
        return AttentionBatch.of_groups(
            starts,
            np.minimum(rows.seq_lens + number, rows.limits).astype(np.int32),
            device_query_starts=rows.starts,
            device_seq_lens=(positions + 1).int(),
            page_tables=[rows.page_table],
            slots=[slots],
        )
