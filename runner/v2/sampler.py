"""Sampling on the device, without a word from the host: the same stages as sampler.py, in the same order.

What a batch asks for is put on the device once and kept while the batch stays the same, which in decoding is nearly
always; what changes with every token (its position, the tokens so far) is read from the state on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.records import SamplingParams
from runner.kernels.sampling import best_of_all_kernel, best_of_parts_kernel, mask_kernel, truncate_kernel
from runner.sampling.noise import choice_keys
from runner.sampling.sampler import MIN_TEMPERATURE
from runner.v2.state import DeviceState

_PART = 4096  # tokens of the vocabulary per program


@dataclass(frozen=True)
class Draw:
    """One token to draw, for the sequence in ``slot``."""

    logits_row: int
    slot: int
    params: SamplingParams
    choice: int
    prompt_len: int


@dataclass(frozen=True)
class _Bias:
    rows: Tensor  # [pairs] int64
    tokens: Tensor  # [pairs] int64
    values: Tensor  # [pairs] float32


@dataclass(frozen=True)
class _Ends:
    """Tokens that may not be drawn before ``until`` tokens are known."""

    rows: Tensor  # [pairs] int64
    tokens: Tensor  # [pairs] int64
    slots: Tensor  # [pairs] int64
    until: Tensor  # [pairs] int32


@dataclass(frozen=True)
class _Penalties:
    rows: Tensor  # [n] int64
    slots: Tensor  # [n] int64
    prompt_len: Tensor  # [n, 1] int32
    repetition: Tensor  # [n, 1] float32
    presence: Tensor  # [n, 1] float32
    frequency: Tensor  # [n, 1] float32


@dataclass(frozen=True)
class _Truncation:
    top_k: Tensor  # [draws] int32
    top_p: Tensor  # [draws] float32
    min_p: Tensor  # [draws] float32


@dataclass(frozen=True)
class SamplingBatch:
    """What the draws of a step ask for, on the device."""

    logits_row: Tensor  # [draws] int32
    slot: Tensor  # [draws] int32
    temperature: Tensor  # [draws] float32, 0 is greedy
    key: Tensor  # [draws] int64
    bias: _Bias | None
    ends: _Ends | None
    penalties: _Penalties | None
    truncation: _Truncation | None
    logprob_draws: tuple[int, ...]  # draws that want log-probabilities
    num_alternatives: dict[int, int]  # how many alternatives each of them wants

    @property
    def changes_logits(self) -> bool:
        stages = (self.bias, self.ends, self.penalties, self.truncation)
        return any(stage is not None for stage in stages)


@dataclass(frozen=True)
class Masks:
    """What grammars allow in one step, on the device."""

    words: Tensor  # [masks, words] int32
    of_draw: Tensor  # [draws] int32: which of the masks, -1 for none


@dataclass(frozen=True)
class Sampled:
    """Drawn tokens, and log-probabilities with a row for each of the batch's ``logprob_draws``."""

    tokens: Tensor  # [draws] int32
    logprobs: Tensor | None = None  # [rows] float32, of the drawn token
    top_ids: Tensor | None = None  # [rows, most alternatives] int64
    top_logprobs: Tensor | None = None  # [rows, most alternatives] float32

    def each(self, change: Callable[[Tensor], Tensor]) -> Sampled:
        """The same with ``change`` applied to every tensor."""
        tensors = (self.tokens, self.logprobs, self.top_ids, self.top_logprobs)
        tokens, *rest = [None if tensor is None else change(tensor) for tensor in tensors]
        assert tokens is not None
        return Sampled(tokens, *rest)


class DeviceSampler:
    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], state: DeviceState) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._state = state
        self._device = state.flat.device

    def prepare(self, draws: Sequence[Draw]) -> SamplingBatch:
        """Put what ``draws`` ask for on the device. Does not wait for the device."""
        params = [draw.params for draw in draws]
        wanted = tuple(i for i, p in enumerate(params) if p.logprobs >= 0)
        keys = choice_keys([p.seed for p in params], [draw.choice for draw in draws])
        logits_row, slot, temperature, key = self._upload(
            np.array([draw.logits_row for draw in draws], dtype=np.int32),
            np.array([draw.slot for draw in draws], dtype=np.int32),
            np.array([0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE) for p in params], dtype=np.float32),
            keys.view(np.int64),
        )
        return SamplingBatch(
            logits_row=logits_row,
            slot=slot,
            temperature=temperature,
            key=key,
            bias=self._bias(params),
            ends=self._ends(draws),
            penalties=self._penalties(draws),
            truncation=self._truncation(params),
            logprob_draws=wanted,
            num_alternatives={i: min(params[i].logprobs, self._vocab_size) for i in wanted},
        )

    def prepare_masks(self, masks: Sequence[bytes], of_draw: Sequence[int]) -> Masks:
        """Put masks on the device, and which of them each draw has. Does not wait for the device."""
        words = np.frombuffer(b"".join(masks), dtype="<i4").reshape(len(masks), -1)
        return Masks(*self._upload(words.copy(), np.array(of_draw, dtype=np.int32)))

    def sample(self, logits: Tensor, batch: SamplingBatch, longest: int, masks: Masks | None = None) -> Sampled:
        """Draw from logits [rows, vocab_size]; no sequence of the batch has more than ``longest`` tokens."""
        adjusted, logits_row = logits, batch.logits_row
        if batch.changes_logits or masks is not None:
            adjusted = self._adjust(logits[batch.logits_row].float(), batch, longest, masks)
            logits_row = torch.arange(adjusted.shape[0], dtype=torch.int32, device=self._device)
        tokens = self._best(adjusted, logits_row, batch)
        return self._with_logprobs(logits, tokens, batch)

    # ------------------------------------------------------------ stages

    def _adjust(self, logits: Tensor, batch: SamplingBatch, longest: int, masks: Masks | None) -> Tensor:
        """logits [draws, vocab_size] float32, changed in place."""
        state = self._state
        if batch.bias is not None:
            logits.index_put_((batch.bias.rows, batch.bias.tokens), batch.bias.values, accumulate=True)
        if batch.ends is not None:
            ends = batch.ends
            forbidden = state.num_tokens[ends.slots] < ends.until
            logits.index_put_(
                (ends.rows, ends.tokens), torch.where(forbidden, -torch.inf, 0.0).to(logits.dtype), accumulate=True
            )
        if batch.penalties is not None:
            rows = batch.penalties.rows
            logits[rows] = self._penalize(logits[rows], batch.penalties, longest)
        if masks is not None:
            mask_kernel[(logits.shape[0], -(-self._vocab_size // _PART))](
                logits,
                logits.stride(0),
                self._vocab_size,
                masks.words,
                masks.words.stride(0),
                masks.of_draw,
                PART=_PART,
            )
        if batch.truncation is not None:
            cut = batch.truncation
            truncate_kernel[(logits.shape[0],)](
                logits,
                logits.stride(0),
                self._vocab_size,
                batch.temperature,
                cut.top_k,
                cut.top_p,
                cut.min_p,
                PART=_PART,
            )
        return logits

    def _penalize(self, logits: Tensor, penalties: _Penalties, longest: int) -> Tensor:
        tokens = self._state.token_ids[penalties.slots, :longest].long()  # [n, longest]
        at = torch.arange(longest, dtype=torch.int32, device=self._device)
        known = at < self._state.num_tokens[penalties.slots, None]
        tokens = torch.where(known, tokens, 0)
        seen = torch.zeros_like(logits).scatter_add_(1, tokens, known.float()) > 0
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition), logits
        )
        produced = (known & (at >= penalties.prompt_len)).float()
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, produced)
        return logits - penalties.frequency * counts - penalties.presence * (counts > 0)

    def _best(self, logits: Tensor, logits_row: Tensor, batch: SamplingBatch) -> Tensor:
        """The best token of each draw, after noise where it is sampled: [draws] int32."""
        draws, parts = logits_row.shape[0], -(-self._vocab_size // _PART)
        values = torch.empty(draws, parts, dtype=torch.float32, device=self._device)
        tokens = torch.empty(draws, parts, dtype=torch.int32, device=self._device)
        sampled = torch.empty(draws, dtype=torch.int32, device=self._device)
        best_of_parts_kernel[(draws, parts)](
            logits,
            logits.stride(0),
            self._vocab_size,
            logits_row,
            batch.temperature,
            batch.key,
            batch.slot,
            self._state.num_tokens,
            values,
            tokens,
            parts,
            PART=_PART,
        )
        best_of_all_kernel[(draws,)](values, tokens, sampled, parts, PARTS=1 << (parts - 1).bit_length())
        return sampled

    def _with_logprobs(self, logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> Sampled:
        if not batch.logprob_draws:
            return Sampled(tokens)
        (draws,) = self._upload(np.array(batch.logprob_draws, dtype=np.int64))
        logprobs = logits[batch.logits_row[draws]].float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens[draws, None].long())[:, 0]
        top = logprobs.topk(max(batch.num_alternatives.values()), dim=-1)
        return Sampled(tokens, chosen, top.indices, top.values)

    # ------------------------------------------------------------ parameters to the device

    def _bias(self, params: Sequence[SamplingParams]) -> _Bias | None:
        pairs = [(i, token, bias) for i, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if not pairs:
            return None
        return _Bias(
            *self._upload(
                np.array([i for i, _, _ in pairs], dtype=np.int64),
                np.array([token for _, token, _ in pairs], dtype=np.int64),
                np.array([bias for _, _, bias in pairs], dtype=np.float32),
            )
        )

    def _ends(self, draws: Sequence[Draw]) -> _Ends | None:
        pairs = [
            (i, token, draw.slot, draw.prompt_len + draw.params.min_tokens)
            for i, draw in enumerate(draws)
            if draw.params.min_tokens > 0 and not draw.params.grammar  # a grammar's masks have seen to it
            for token in sorted({*self._eos, *draw.params.stop_token_ids})
        ]
        if not pairs:
            return None
        columns = np.array(pairs, dtype=np.int64).T
        return _Ends(*self._upload(columns[0], columns[1], columns[2], columns[3].astype(np.int32)))

    def _penalties(self, draws: Sequence[Draw]) -> _Penalties | None:
        rows = [i for i, draw in enumerate(draws) if draw.params.has_penalty]
        if not rows:
            return None
        params = [draws[i].params for i in rows]
        uploaded = self._upload(
            np.array(rows, dtype=np.int64),
            np.array([draws[i].slot for i in rows], dtype=np.int64),
            np.array([[draws[i].prompt_len] for i in rows], dtype=np.int32),
            np.array([[p.repetition_penalty] for p in params], dtype=np.float32),
            np.array([[p.presence_penalty] for p in params], dtype=np.float32),
            np.array([[p.frequency_penalty] for p in params], dtype=np.float32),
        )
        return _Penalties(*uploaded)

    def _truncation(self, params: Sequence[SamplingParams]) -> _Truncation | None:
        drawn = [not p.greedy and p.truncates for p in params]
        if not any(drawn):
            return None
        vocab = self._vocab_size
        columns = [
            (min(p.top_k or vocab, vocab), p.top_p, p.min_p) if cut else (vocab, 1.0, 0.0)
            for p, cut in zip(params, drawn, strict=True)
        ]
        return _Truncation(
            *self._upload(
                np.array([k for k, _, _ in columns], dtype=np.int32),
                np.array([p for _, p, _ in columns], dtype=np.float32),
                np.array([p for _, _, p in columns], dtype=np.float32),
            )
        )

    def _upload(self, *arrays: NDArray[np.generic]) -> list[Tensor]:
        """Arrays to the device in one copy that the host does not wait for."""
        return upload(arrays, self._device)


def upload(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Tensors of these arrays on the device, in one copy from pinned memory. No wait: the stream orders it."""
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type != "cuda":
        return tensors
    sizes = [-(-t.numel() * t.itemsize // 8) * 8 for t in tensors]  # each begins on a multiple of 8 bytes
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(host.split(sizes), tensors, strict=True):
        part[: tensor.numel() * tensor.itemsize].view(tensor.dtype).copy_(tensor.view(-1))
    parts = host.to(device, non_blocking=True).split(sizes)
    return [part[: t.numel() * t.itemsize].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]
