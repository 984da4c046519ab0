"""Log-probabilities of prompt tokens, from the hidden states of a step. Plain torch, outside of CUDA graphs.

They need logits of every token, of which there may be thousands in a step: these are computed some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.protocols import PendingStep
from pdserve.records import PromptLogprobs, StepOutput
from runner.sampling.prompt_targets import Targets

_ROWS = 128  # of logits at a time: 80 MB of float32 where there are 152 k tokens
_TOKENS_PER_RECORD = 1024


def follow(
    step: PendingStep, targets: Sequence[Targets], hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> PendingStep:
    """The step, with the log-probabilities of ``targets``; ``hidden`` [tokens, hidden_size] are of all its tokens.

    ``logits`` makes [rows, vocab_size] of some of them. All shards have to do this alike.
    """
    table, arrived = _scored(targets, hidden, logits), None
    if table.device.type == "cuda":
        on_host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        table = on_host.copy_(table, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return _ScoredStep(step, tuple(targets), table, arrived)


def _scored(targets: Sequence[Targets], hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """A row per target, as PromptLogprobs has them, with as many best tokens as anybody asks for: int32."""
    rows = _index(chain.from_iterable(each.rows for each in targets), hidden.device)
    token_ids = _index(chain.from_iterable(each.token_ids for each in targets), hidden.device)
    most = max(each.num_top for each in targets)
    slices = zip(rows.split(_ROWS), token_ids.split(_ROWS), strict=True)
    return torch.cat([_score(logits(hidden.index_select(0, some)), ids, most) for some, ids in slices])


def _score(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Rows of the table: log-probability and rank of ``token_ids`` [rows], the best ids, their log-probabilities."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(-1, keepdim=True, dtype=torch.int32) + 1
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    own, best = own - total, top.values - total
    return torch.cat([own.view(torch.int32), ranks, top.indices.int(), best.view(torch.int32)], dim=1)


def _index(values: Iterator[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.int64)).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _ScoredStep:
    """A pdserve.protocols.PendingStep."""

    step: PendingStep
    targets: tuple[Targets, ...]
    table: Tensor  # [targets of all sequences, words] int32, host; complete when ``arrived`` has happened
    arrived: torch.cuda.Event | None  # None where the device is the host

    def result(self) -> StepOutput:
        output = self.step.result()
        if self.arrived is not None:
            self.arrived.synchronize()
        return msgspec.structs.replace(output, prompt_logprobs=tuple(self._records()))

    def _records(self) -> Iterator[tuple[int, PromptLogprobs]]:
        table, row = self.table.numpy().astype("<i4", copy=False), 0
        for targets in self.targets:
            count = len(targets.token_ids)
            for begin in range(0, count, _TOKENS_PER_RECORD):
                end = min(begin + _TOKENS_PER_RECORD, count)
                yield targets.seq, _record(targets, begin, table[row + begin : row + end])
            row += count


def _record(targets: Targets, begin: int, table: NDArray[np.int32]) -> PromptLogprobs:
    """Of the targets from ``begin`` on, whose rows may hold more of the best tokens than they ask for."""
    most = table.shape[1] // 2 - 1
    num_top = min(targets.num_top, most)
    wanted = [0, 1, *range(2, 2 + num_top), *range(2 + most, 2 + most + num_top)]
    return PromptLogprobs(targets.first + begin, num_top, table[:, wanted].tobytes())
