"""Sampling on the device without the host: the stages of runner/sampling/sampler.py, in the same order.

Values that change with every token (its position, the tokens so far) are read from the device's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.kernels.sampling import best_of_all_kernel, best_of_parts_kernel, mask_kernel, truncate_kernel
from runner.sampling.sampler import LogprobTable, best_logprobs
from runner.v2.device_state import DeviceState
from runner.v2.sampling_metadata import GrammarMaskTensors, Penalties, SamplingMetadata, copy_to_device

_PART = 4096  # tokens of the vocabulary per program


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens, and log-probabilities with a row for each sample of ``SamplingMetadata.num_logprobs``."""

    tokens: Tensor  # [samples] int32
    logprobs: LogprobTable | None = None
    drafts: Tensor | None = None  # [sequences that sample, drafts] int32, made by the model

    def map(self, change: Callable[[Tensor], Tensor]) -> SamplerOutput:
        """Return the output with ``change`` applied to every tensor."""
        tokens = change(self.tokens)
        drafts = None if self.drafts is None else change(self.drafts)
        if self.logprobs is None:
            return SamplerOutput(tokens, drafts=drafts)
        chosen, top_ids, top_logprobs = self.logprobs
        return SamplerOutput(tokens, (change(chosen), change(top_ids), change(top_logprobs)), drafts)


class DeviceSampler:
    def __init__(self, vocab_size: int, state: DeviceState) -> None:
        self._vocab_size = vocab_size
        self._state = state
        self._device = state.flat.device

    def sample(
        self, logits: Tensor, metadata: SamplingMetadata, longest: int, masks: GrammarMaskTensors | None = None
    ) -> SamplerOutput:
        """Sample from logits [rows, vocab_size]; no sequence of the batch has more than ``longest`` tokens."""
        adjusted = logits
        logits_row = metadata.logits_row
        if metadata.changes_logits or masks is not None:
            adjusted = self._adjust(logits[metadata.logits_row].float(), metadata, longest, masks)
            logits_row = torch.arange(adjusted.shape[0], dtype=torch.int32, device=self._device)
        tokens = self._best(adjusted, logits_row, metadata)
        return self._with_logprobs(logits, tokens, metadata)

    def _adjust(
        self, logits: Tensor, metadata: SamplingMetadata, longest: int, masks: GrammarMaskTensors | None
    ) -> Tensor:
        """Change logits [samples, vocab_size] float32 in place."""
        state = self._state
        if metadata.bias is not None:
            rows, tokens, values = metadata.bias
            logits.index_put_((rows, tokens), values, accumulate=True)
        if metadata.min_tokens is not None:
            rows, tokens, slots, until = metadata.min_tokens
            penalty = torch.where(state.num_tokens[slots] < until, -torch.inf, 0.0).to(logits.dtype)
            logits.index_put_((rows, tokens), penalty, accumulate=True)
        if metadata.penalties is not None:
            rows = metadata.penalties.rows
            logits[rows] = self._penalize(logits[rows], metadata.penalties, longest)
        if masks is not None:
            words, of_sample = masks
            mask_kernel[(logits.shape[0], -(-self._vocab_size // _PART))](
                logits, logits.stride(0), self._vocab_size, words, words.stride(0), of_sample, PART=_PART
            )
        if metadata.truncation is not None:
            truncate_kernel[(logits.shape[0],)](
                logits, logits.stride(0), self._vocab_size, metadata.temperature, *metadata.truncation, PART=_PART
            )
        return logits

    def _penalize(self, logits: Tensor, penalties: Penalties, longest: int) -> Tensor:
        tokens = self._state.token_ids[penalties.slots, :longest].long()  # [n, longest]
        at = torch.arange(longest, dtype=torch.int32, device=self._device)
        token_mask = at < self._state.num_tokens[penalties.slots, None] + penalties.drafts_before
        tokens = torch.where(token_mask, tokens, 0)
        seen = torch.zeros_like(logits).scatter_add_(1, tokens, token_mask.float()) > 0
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition), logits
        )
        produced = (token_mask & (at >= penalties.prompt_len)).float()
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, produced)
        return logits - penalties.frequency * counts - penalties.presence * (counts > 0)

    def _best(self, logits: Tensor, logits_row: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return the best token of each sample, with noise unless it is greedy: [samples] int32."""
        num_samples = logits_row.shape[0]
        parts = -(-self._vocab_size // _PART)
        values = torch.empty(num_samples, parts, dtype=torch.float32, device=self._device)
        tokens = torch.empty(num_samples, parts, dtype=torch.int32, device=self._device)
        sampled = torch.empty(num_samples, dtype=torch.int32, device=self._device)
        best_of_parts_kernel[(num_samples, parts)](
            logits,
            logits.stride(0),
            self._vocab_size,
            logits_row,
            metadata.temperature,
            metadata.key,
            metadata.slot,
            self._state.num_tokens,
            metadata.drafts_before,
            values,
            tokens,
            parts,
            PART=_PART,
        )
        best_of_all_kernel[(num_samples,)](values, tokens, sampled, parts, PARTS=1 << (parts - 1).bit_length())
        return sampled

    def _with_logprobs(self, logits: Tensor, tokens: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        if not metadata.num_logprobs:
            return SamplerOutput(tokens)
        (samples,) = copy_to_device([np.array(list(metadata.num_logprobs), dtype=np.int64)], self._device)
        logprobs = logits[metadata.logits_row[samples]].float().log_softmax(-1)
        num_top = max(metadata.num_logprobs.values())
        return SamplerOutput(tokens, best_logprobs(logprobs, tokens[samples], num_top, metadata.requested_ids))
