"""Log-probabilities of prompt tokens, from the hidden states of a step. Plain torch, outside of CUDA graphs.

They need logits of every prompt token. A step may hold thousands, so logits are computed a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.logprobs import PromptLogprobs
from pdserve.records import StepOutput, StepPlan
from runner.loading.model_loader import LoadedModel
from runner.pending_step import HostCopy
from runner.sampling.prompt_targets import PromptTargets, Targets
from runner.step_parts import StepFeature, StepPart

_ROWS = 128  # rows of logits at a time: 80 MB of float32 with a vocabulary of 152 k
_TOKENS_PER_RECORD = 1024


class PromptScoring(PromptTargets, StepFeature[object]):
    """Scores prompts on the last pipeline stage. All tensor shards of the stage score alike."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self._model = model

    def part(self, plan: StepPlan) -> StepPart[object] | None:
        targets = self.take(plan.scheduled)
        return _ScoredTokens(targets, self._model.decoder.logits) if targets else None


class _ScoredTokens(StepPart[object]):
    needs_all_hidden_states = True

    def __init__(self, targets: Sequence[Targets], logits: Callable[[Tensor], Tensor]) -> None:
        self._targets = targets
        self._logits = logits

    def after_forward(self, batch: object, hidden: Tensor) -> None:
        self._table = HostCopy.start(_score_rows(self._targets, hidden, self._logits))

    def on_result(self, output: StepOutput) -> StepOutput:
        table = self._table.wait().numpy().astype("<i4", copy=False)
        return msgspec.structs.replace(output, prompt_logprobs=tuple(self._records(table)))

    def _records(self, table: NDArray[np.int32]) -> Iterator[tuple[int, PromptLogprobs]]:
        row = 0
        for targets in self._targets:
            count = len(targets.token_ids)
            for begin in range(0, count, _TOKENS_PER_RECORD):
                end = min(begin + _TOKENS_PER_RECORD, count)
                yield targets.seq, _record(targets, begin, table[row + begin : row + end])
            row += count


def _score_rows(targets: Sequence[Targets], hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a row per target as in PromptLogprobs, with the largest ``num_top`` of all: [targets, words] int32.

    ``logits`` turns hidden states [rows, hidden_size] into [rows, vocab_size].
    """
    rows = _index(chain.from_iterable(target.rows for target in targets), hidden.device)
    token_ids = _index(chain.from_iterable(target.token_ids for target in targets), hidden.device)
    num_top = max(target.num_top for target in targets)
    slices = zip(rows.split(_ROWS), token_ids.split(_ROWS), strict=True)
    return torch.cat([_score(logits(hidden.index_select(0, some)), ids, num_top) for some, ids in slices])


def _score(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Return table rows: log-probability and rank of ``token_ids`` [rows], the best ids, their log-probabilities."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(-1, keepdim=True, dtype=torch.int32) + 1
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    own = own - total
    best = top.values - total
    return torch.cat([own.view(torch.int32), ranks, top.indices.int(), best.view(torch.int32)], dim=1)


def _index(values: Iterator[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.int64)).to(device, non_blocking=True)


def _record(targets: Targets, begin: int, table: NDArray[np.int32]) -> PromptLogprobs:
    """Return the targets from ``begin`` on; table rows may hold more alternatives than the targets ask for."""
    most = table.shape[1] // 2 - 1
    num_top = min(targets.num_top, most)
    wanted = [0, 1, *range(2, 2 + num_top), *range(2 + most, 2 + most + num_top)]
    return PromptLogprobs(targets.first + begin, num_top, table[:, wanted].tobytes())
