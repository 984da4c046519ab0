"""Vectors of prompts, from the hidden states of a step: embeddings and scores. Nothing is sampled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from pdserve.model.pooling import MEAN, SCORE, YES_OR_NO, PoolingConfig
from pdserve.records import NewSequence, ScheduledSequence, StepOutput, StepPlan
from runner.pending_step import HostCopy
from runner.step_parts import StepFeature, StepPart

_NO_TOKEN = 0  # sample of a prompt that ends with its vector


@dataclass
class PromptSum:
    """The sum of the hidden states of a prompt's first ``num_tokens`` tokens, [hidden_size] float32."""

    num_tokens: int
    total: Tensor


class PromptSums:
    """Sums of prompts that are computed in parts.

    A preempted prompt starts again behind its cached blocks, so its sum is kept while there is room. A prompt whose sum
    was lost has no vector.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sums: OrderedDict[int, PromptSum] = OrderedDict()  # by sequence
        self._next: dict[int, int] = {}  # by sequence: the number of tokens that are computed

    def add(self, new: NewSequence) -> None:
        self._next[new.seq] = new.num_computed
        if new.num_computed == 0 or new.seq not in self._sums:
            self._sums[new.seq] = PromptSum(0, torch.zeros(()))
        while len(self._sums) > self._most:
            self._sums.popitem(last=False)

    def count(self, seq: int, hidden: Tensor) -> PromptSum | None:
        """Add the next tokens of a sequence, [tokens, hidden_size]; return the sum, None if a part is missing."""
        start = self._next[seq]
        self._next[seq] = end = start + len(hidden)
        prompt_sum = self._sums.get(seq)
        if prompt_sum is None or prompt_sum.num_tokens < start:
            return None
        if end > prompt_sum.num_tokens:
            prompt_sum.total = hidden[prompt_sum.num_tokens - start :].float().sum(0) + prompt_sum.total.to(
                hidden.device
            )
            prompt_sum.num_tokens = end
        return prompt_sum

    def remove(self, seq: int) -> None:
        """Forget what is computed, as the sequence ended or was preempted; its sum is kept."""
        self._next.pop(seq, None)

    def forget(self, seq: int) -> None:
        self._sums.pop(seq, None)


class PromptPooling(StepFeature[object]):
    """Pools on the last pipeline stage. All tensor shards of the stage pool alike."""

    def __init__(self, config: PoolingConfig, logits: Callable[[Tensor], Tensor], max_num_seqs: int) -> None:
        self._config = config
        self._logits = logits
        self._sums = PromptSums(4 * max_num_seqs)

    def add(self, new: NewSequence) -> None:
        if self._config.method == MEAN:
            self._sums.add(new)

    def remove(self, seq: int) -> None:
        self._sums.remove(seq)

    def part(self, plan: StepPlan) -> StepPart[object] | None:
        return _PooledPrompts(self, plan.scheduled) if plan.scheduled else None

    def vectors(self, scheduled: Sequence[ScheduledSequence], hidden: Tensor) -> Tensor:
        """Return [ended prompts, size] float32; NaN for a prompt whose sum was lost."""
        rows: list[Tensor] = []
        start = 0
        for item in scheduled:
            tokens = hidden[start : start + item.num_tokens]
            start += item.num_tokens
            if self._config.method == MEAN:
                prompt_sum = self._sums.count(item.seq, tokens)
                if item.num_samples:
                    self._sums.forget(item.seq)
                    lost = torch.full_like(tokens[-1], torch.nan, dtype=torch.float32)
                    rows.append(lost if prompt_sum is None else prompt_sum.total / prompt_sum.num_tokens)
            elif item.num_samples:
                rows.append(tokens[-1])
        if not rows:
            return hidden.new_empty(0, self._config.size, dtype=torch.float32)
        return self._pool(torch.stack(rows))

    def _pool(self, states: Tensor) -> Tensor:
        config = self._config
        if config.method == YES_OR_NO:
            answers = self._logits(states)[:, list(config.token_ids)].float()
            return answers.softmax(-1)[:, 1:]
        if config.method == SCORE:
            scores = self._logits(states).float()
            return scores.sigmoid() if config.size == 1 else scores.softmax(-1)
        states = states.float()
        return torch.nn.functional.normalize(states, dim=-1) if config.normalize else states


class _PooledPrompts(StepPart[object]):
    needs_all_hidden_states = True

    def __init__(self, pooling: PromptPooling, scheduled: Sequence[ScheduledSequence]) -> None:
        self._pooling = pooling
        self._scheduled = scheduled

    def after_forward(self, batch: object, hidden: Tensor) -> None:
        self._vectors = HostCopy.start(self._pooling.vectors(self._scheduled, hidden).contiguous())

    def on_result(self, output: StepOutput) -> StepOutput:
        token_ids = (_NO_TOKEN,) * sum(item.num_samples for item in self._scheduled)
        return msgspec.structs.replace(output, token_ids=token_ids, pooled=tuple(self._records()))

    def _records(self) -> Iterator[tuple[int, bytes]]:
        table = self._vectors.wait().numpy().astype("<f4", copy=False)
        ended = (item.seq for item in self._scheduled if item.num_samples)
        for seq, vector in zip(ended, table, strict=True):
            yield seq, vector.tobytes()
