"""From logits to tokens: adjustments, truncation, and a sample that depends on the request alone.

Order: logit bias · min_tokens · repetition, presence and frequency penalties · mask · temperature ·
top-k · top-p · min-p · Gumbel noise (noise.py) · argmax. Greedy rows skip the stages from temperature to noise.
Log-probabilities come from the raw logits. A mask, of a grammar or of token rules, respects min_tokens already. Each
stage touches only the rows that need it, so plain greedy decoding costs one argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.logprobs import TokenLogprobs
from pdserve.records import TokenMask
from pdserve.sampling_params import SamplingParams
from runner.sampling.noise import gumbel_noise, row_keys

MIN_TEMPERATURE = 1e-5  # float32 logits overflow below it; at it the best token always wins
_CANDIDATES = 1024  # the best tokens are sorted first; all tokens only if these do not suffice


#: Log-probabilities of sampled tokens [rows] float32, ids of the best tokens [rows, n] int64, their log-probabilities.
LogprobTable = tuple[Tensor, Tensor, Tensor]


#: Row, column and token id of each entry that replaces a best token: [3, entries] int64.
RequestedIds = Tensor


def requested_ids(params: Iterable[SamplingParams]) -> NDArray[np.int64] | None:
    """Return the RequestedIds of samples that want log-probabilities; None if none of them names tokens."""
    entries = [
        (row, column, token_id)
        for row, sampling in enumerate(params)
        for column, token_id in enumerate(sampling.logprob_token_ids)
    ]
    return np.array(entries, dtype=np.int64).T if entries else None


def best_logprobs(
    logprobs: Tensor, tokens: Tensor, num_top: int, requested: RequestedIds | None = None
) -> LogprobTable:
    """Take entries for ``tokens`` [rows] and the best ``num_top``, or requested, from logprobs [rows, vocab_size]."""
    chosen = logprobs.gather(1, tokens[:, None].long())[:, 0]
    top = logprobs.topk(num_top, dim=-1)
    if requested is not None:
        rows, columns, token_ids = requested
        top.indices[rows, columns] = token_ids
        top.values[rows, columns] = logprobs[rows, token_ids]
    return chosen, top.indices, top.values


def token_logprobs(table: LogprobTable, num_top: Iterable[int]) -> list[TokenLogprobs]:
    """Convert a table to records; row i keeps the best ``num_top[i]`` tokens."""
    rows = zip(num_top, *[column.tolist() for column in table], strict=True)
    return [TokenLogprobs(chosen, tuple(ids[:count]), tuple(values[:count])) for count, chosen, ids, values in rows]


@dataclass(frozen=True)
class HostSamplingRow:
    """One token to sample, behind ``tokens``, of which the first ``prompt_len`` are the prompt."""

    logits_row: int
    params: SamplingParams
    choice: int
    tokens: NDArray[np.int32]
    prompt_len: int
    mask: bytes | None = None  # allowed tokens as in TokenMask; None: all


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos = eos_token_ids
        self._device = device
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def sample(
        self, logits: Tensor, rows: Sequence[HostSamplingRow]
    ) -> tuple[tuple[int, ...], dict[int, TokenLogprobs]]:
        """Sample one token per row from logits [logits_rows, vocab_size]. Return them, and log-probabilities by row."""
        if [row.logits_row for row in rows] != list(range(logits.shape[0])):
            logits = logits[self._index([row.logits_row for row in rows])]
        raw = logits.float()
        adjusted = self._adjust(raw, rows)
        tokens = adjusted.argmax(-1)
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            index = self._index(random)
            tokens[index] = self._sample_random(adjusted[index], [rows[i] for i in random])
        return tuple(tokens.tolist()), self._logprobs(raw, tokens, rows)

    # ------------------------------------------------------------ adjustments, in place on a copy

    def _adjust(self, raw: Tensor, rows: Sequence[HostSamplingRow]) -> Tensor:
        """Return adjusted logits; the raw ones themselves if no row needs adjustment."""
        biased = [i for i, row in enumerate(rows) if row.params.logit_bias]
        too_short = [
            i
            for i, row in enumerate(rows)
            if row.mask is None and len(row.tokens) - row.prompt_len < row.params.min_tokens
        ]
        penalized = [i for i, row in enumerate(rows) if row.params.has_penalty]
        masked = [i for i, row in enumerate(rows) if row.mask is not None]
        if not (biased or too_short or penalized or masked):
            return raw
        logits = raw.clone()
        if biased:
            pairs = [(i, token, bias) for i in biased for token, bias in rows[i].params.logit_bias.items()]
            where = (self._index([i for i, _, _ in pairs]), self._index([token for _, token, _ in pairs]))
            logits[where] += self._floats([bias for _, _, bias in pairs])
        if too_short:
            stops = [(i, token) for i in too_short for token in {*self._eos, *rows[i].params.stop_token_ids}]
            logits[self._index([i for i, _ in stops]), self._index([token for _, token in stops])] = -torch.inf
        if penalized:
            index = self._index(penalized)
            logits[index] = self._penalize(logits[index], [rows[i] for i in penalized])
        if masked:
            index = self._index(masked)
            allowed = self._allowed([rows[i].mask or b"" for i in masked])
            logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
        return logits

    def _allowed(self, masks: Sequence[bytes]) -> Tensor:
        """Unpack masks to [masks, vocab_size] bool."""
        vocab_size = len(self._token_ids)
        words = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), TokenMask.num_bytes(vocab_size))
        bits = torch.from_numpy(np.unpackbits(words, axis=1, count=vocab_size, bitorder="little"))
        return bits.to(self._device).bool()

    def _penalize(self, logits: Tensor, rows: Sequence[HostSamplingRow]) -> Tensor:
        """Apply repetition (arXiv 1909.05858, prompt and output), then presence and frequency (output)."""
        seen = self._counts(logits, [row.tokens for row in rows]) > 0
        repetition = self._column(rows, lambda p: p.repetition_penalty)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, scaled, logits)
        counts = self._counts(logits, [row.tokens[row.prompt_len :] for row in rows])
        presence = self._column(rows, lambda p: p.presence_penalty)
        frequency = self._column(rows, lambda p: p.frequency_penalty)
        return logits - frequency * counts - presence * (counts > 0)

    def _counts(self, like: Tensor, tokens: Sequence[NDArray[np.int32]]) -> Tensor:
        """Count each token: [rows, vocab_size] float32."""
        counts = torch.zeros_like(like)
        rows = np.repeat(np.arange(len(tokens)), [len(t) for t in tokens])
        where = (self._index(rows), self._index(np.concatenate(tokens)))
        return counts.index_put_(where, torch.ones(len(rows), device=self._device), accumulate=True)

    # ------------------------------------------------------------ random rows

    def _sample_random(self, logits: Tensor, rows: Sequence[HostSamplingRow]) -> Tensor:
        logits = logits / self._column(rows, lambda p: max(p.temperature, MIN_TEMPERATURE))
        truncated = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
        if truncated:
            index = self._index(truncated)
            logits[index] = self._top_k_top_p(logits[index], [rows[i] for i in truncated])
        if any(row.params.min_p > 0.0 for row in rows):
            # p >= min_p * p_max as logits; the log of 0 is -inf, which keeps every token
            floor = logits.amax(-1, keepdim=True) + self._column(rows, lambda p: p.min_p).log()
            logits.masked_fill_(logits < floor, -torch.inf)
        keys = row_keys(
            [row.params.seed for row in rows], [row.choice for row in rows], [len(row.tokens) for row in rows]
        )
        return (logits + gumbel_noise(keys, self._token_ids)).argmax(-1)

    def _top_k_top_p(self, logits: Tensor, rows: Sequence[HostSamplingRow]) -> Tensor:
        """Keep the k best tokens, and of them the fewest whose probability reaches p; set others to -inf."""
        vocab = logits.shape[1]
        top_k = torch.tensor([row.params.top_k or vocab for row in rows], device=self._device)[:, None]
        top_p = self._column(rows, lambda p: p.top_p)
        size = min(_CANDIDATES, vocab)
        while True:
            best, tokens = logits.topk(size, dim=-1)  # sorted, best first
            kept = torch.arange(size, device=self._device) < top_k
            limited = best.masked_fill(~kept, -torch.inf)
            # If k exceeds the candidates, unsorted tokens count towards the total as well.
            total = torch.where(top_k > size, logits.logsumexp(-1, keepdim=True), limited.logsumexp(-1, keepdim=True))
            probabilities = (limited - total).exp()
            before = probabilities.cumsum(-1) - probabilities
            kept &= (before < top_p) | (top_p >= 1.0)
            kept[:, 0] = True
            if size == vocab or bool((~kept[:, -1] | (top_k[:, 0] <= size)).all()):
                break
            size = vocab
        result = torch.full_like(logits, -torch.inf)
        return result.scatter_(1, tokens, best.masked_fill(~kept, -torch.inf))

    # ------------------------------------------------------------ log-probabilities

    def _logprobs(self, raw: Tensor, tokens: Tensor, rows: Sequence[HostSamplingRow]) -> dict[int, TokenLogprobs]:
        wanted = {i: row.params.num_alternatives for i, row in enumerate(rows) if row.params.logprobs >= 0}
        if not wanted:
            return {}
        index = self._index(list(wanted))
        requested = requested_ids(rows[i].params for i in wanted)
        table = best_logprobs(
            raw[index].log_softmax(-1),
            tokens[index],
            min(max(wanted.values()), raw.shape[1]),
            None if requested is None else self._index(requested),
        )
        return dict(zip(wanted, token_logprobs(table, wanted.values()), strict=True))

    # ------------------------------------------------------------ host to device

    def _column(self, rows: Sequence[HostSamplingRow], value: Callable[[SamplingParams], float]) -> Tensor:
        return self._floats([value(row.params) for row in rows])[:, None]

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _index(self, values: Sequence[int] | NDArray[np.integer]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)
