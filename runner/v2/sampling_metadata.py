"""Sampling parameters of a batch, on the device.

They are copied once and kept while the batch stays the same, which in decoding is nearly always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.records import TokenMask
from pdserve.sampling_params import SamplingParams
from runner.sampling.noise import choice_keys
from runner.sampling.sampler import MIN_TEMPERATURE, RequestedIds, requested_ids


@dataclass(frozen=True)
class DeviceSamplingRow:
    """One token to sample, for the sequence in ``slot``."""

    logits_row: int
    slot: int
    params: SamplingParams
    choice: int
    prompt_len: int
    drafts_before: int = 0  # drafts of the step between the sequence's tokens and this one


class LogitBias(NamedTuple):
    rows: Tensor  # [pairs] int64
    tokens: Tensor  # [pairs] int64
    values: Tensor  # [pairs] float32


class MinTokens(NamedTuple):
    """Stop tokens that are forbidden while a sequence has fewer than ``until`` tokens, without drafts."""

    rows: Tensor  # [pairs] int64
    tokens: Tensor  # [pairs] int64
    slots: Tensor  # [pairs] int64
    until: Tensor  # [pairs] int32


class Penalties(NamedTuple):
    rows: Tensor  # [n] int64
    slots: Tensor  # [n] int64
    drafts_before: Tensor  # [n, 1] int32
    prompt_len: Tensor  # [n, 1] int32
    repetition: Tensor  # [n, 1] float32
    presence: Tensor  # [n, 1] float32
    frequency: Tensor  # [n, 1] float32


class Truncation(NamedTuple):
    top_k: Tensor  # [samples] int32
    top_p: Tensor  # [samples] float32
    min_p: Tensor  # [samples] float32


@dataclass(frozen=True)
class SamplingMetadata:
    """The parameters of a step's samples; None for a stage that no sample asks for."""

    logits_row: Tensor  # [samples] int32
    slot: Tensor  # [samples] int32
    drafts_before: Tensor  # [samples] int32
    temperature: Tensor  # [samples] float32, 0 is greedy
    key: Tensor  # [samples] int64
    bias: LogitBias | None
    min_tokens: MinTokens | None
    penalties: Penalties | None
    truncation: Truncation | None
    num_logprobs: dict[int, int]  # by sample that wants log-probabilities: how many alternatives
    requested_ids: RequestedIds | None  # the rows are those of ``num_logprobs``

    @property
    def changes_logits(self) -> bool:
        stages = (self.bias, self.min_tokens, self.penalties, self.truncation)
        return any(stage is not None for stage in stages)


class GrammarMaskTensors(NamedTuple):
    """The tokens that grammars allow in one step, on the device."""

    words: Tensor  # [masks, words] int32
    of_sample: Tensor  # [samples] int32: index of the sample's mask, -1 for none


class MetadataBuilder:
    """Copies sampling parameters to the device. The host never waits for the device."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device

    def build(self, rows: Sequence[DeviceSamplingRow]) -> SamplingMetadata:
        params = [row.params for row in rows]
        keys = choice_keys([p.seed for p in params], [row.choice for row in rows]).view(np.int64)
        columns = [
            (row.logits_row, row.slot, row.drafts_before, _temperature(row.params), key)
            for row, key in zip(rows, keys, strict=True)
        ]
        dtypes = (np.int32, np.int32, np.int32, np.float32, np.int64)
        logits_row, slot, drafts_before, temperature, key = self._copy(columns, *dtypes)
        return SamplingMetadata(
            logits_row=logits_row,
            slot=slot,
            drafts_before=drafts_before,
            temperature=temperature,
            key=key,
            bias=self._bias(params),
            min_tokens=self._min_tokens(rows),
            penalties=self._penalties(rows),
            truncation=self._truncation(params),
            num_logprobs={
                i: min(p.num_alternatives, self._vocab_size) for i, p in enumerate(params) if p.logprobs >= 0
            },
            requested_ids=self._requested_ids(params),
        )

    def build_masks(self, masks: Sequence[bytes], of_sample: Sequence[int]) -> GrammarMaskTensors:
        """Copy masks, as TokenMask has them, and the index of each sample's mask."""
        words = np.frombuffer(b"".join(masks), dtype=np.int32)
        words = words.reshape(len(masks), TokenMask.num_bytes(self._vocab_size) // words.itemsize)
        return GrammarMaskTensors(*copy_to_device([words.copy(), np.array(of_sample, dtype=np.int32)], self._device))

    def _bias(self, params: Sequence[SamplingParams]) -> LogitBias | None:
        pairs = [(i, token, bias) for i, p in enumerate(params) for token, bias in p.logit_bias.items()]
        return LogitBias(*self._copy(pairs, np.int64, np.int64, np.float32)) if pairs else None

    def _min_tokens(self, rows: Sequence[DeviceSamplingRow]) -> MinTokens | None:
        pairs = [
            (i, token, row.slot, row.prompt_len + row.params.min_tokens - row.drafts_before)
            for i, row in enumerate(rows)
            if row.params.min_tokens > 0 and not row.params.masked  # masks respect min_tokens already
            for token in sorted({*self._eos, *row.params.stop_token_ids})
        ]
        return MinTokens(*self._copy(pairs, np.int64, np.int64, np.int64, np.int32)) if pairs else None

    def _requested_ids(self, params: Sequence[SamplingParams]) -> RequestedIds | None:
        requested = requested_ids(p for p in params if p.logprobs >= 0)
        return None if requested is None else copy_to_device([requested], self._device)[0]

    def _penalties(self, rows: Sequence[DeviceSamplingRow]) -> Penalties | None:
        penalized = [
            (i, row.slot, *([value] for value in (row.drafts_before, row.prompt_len, *_penalties_of(row.params))))
            for i, row in enumerate(rows)
            if row.params.has_penalty
        ]
        dtypes = (np.int64, np.int64, np.int32, np.int32, np.float32, np.float32, np.float32)
        return Penalties(*self._copy(penalized, *dtypes)) if penalized else None

    def _truncation(self, params: Sequence[SamplingParams]) -> Truncation | None:
        if not any(p.truncates and not p.greedy for p in params):
            return None
        vocab = self._vocab_size
        limits = [
            (min(p.top_k or vocab, vocab), p.top_p, p.min_p) if p.truncates and not p.greedy else (vocab, 1.0, 0.0)
            for p in params
        ]
        return Truncation(*self._copy(limits, np.int32, np.float32, np.float32))

    def _copy(self, rows: Sequence[tuple[Any, ...]], *dtypes: type[np.generic]) -> list[Tensor]:
        """Copy the columns of ``rows`` to the device, one tensor per dtype."""
        columns = zip(*rows, strict=True)
        arrays = [np.array(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True)]
        return copy_to_device(arrays, self._device)


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)


def _penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def copy_to_device(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Return tensors of these arrays on the device, in one copy from pinned memory that the host does not wait for."""
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type != "cuda":
        return tensors
    sizes = [-(-t.numel() * t.itemsize // 8) * 8 for t in tensors]  # each begins on a multiple of 8 bytes
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(host.split(sizes), tensors, strict=True):
        part[: tensor.numel() * tensor.itemsize].view(tensor.dtype).copy_(tensor.view(-1))
    parts = host.to(device, non_blocking=True).split(sizes)
    return [part[: t.numel() * t.itemsize].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]
