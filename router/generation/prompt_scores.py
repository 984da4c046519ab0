"""Log-probabilities of a prompt's tokens, as a decode node sends them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from pdserve.logprobs import MOST_LOGPROB, PromptLogprobs
from router.errors import MalformedOutput
from router.generation.job import Job
from router.generation.logprob_table import LogprobTable
from router.generation.token_logprob import LOWEST


class PromptScores:
    """Collects consecutive runs of token positions. After a migration they start again at position 1."""

    def __init__(self, job: Job) -> None:
        self.token_ids = job.prompt.unpacked()
        self._num_top = job.sampling.prompt_logprobs
        self._vocab_size = job.vocab_size
        self._runs: list[PromptLogprobs] = []

    def add(self, run: PromptLogprobs) -> None:
        """Raises MalformedOutput for a run that is not the next one, or has values that no prompt has."""
        if run.num_top > self._num_top:
            text = f"{run.num_top} alternatives of prompt tokens, where {self._num_top} were asked for"
            raise MalformedOutput("prompt_logprobs", text)
        if run.first == 1:
            self._runs.clear()
        if run.first != self._end or len(run.table) % run.row_bytes(run.num_top) or run.end > len(self.token_ids):
            text = f"log-probabilities of prompt tokens {run.first} … {run.end - 1} where {self._end} is the next"
            raise MalformedOutput("prompt_logprobs", f"{text} of {len(self.token_ids)}")
        rows = _rows(run)
        if not (np.all(rows["own"] <= MOST_LOGPROB) and np.all(rows["top"] <= MOST_LOGPROB)):
            raise MalformedOutput("prompt_logprobs", "a log-probability of a prompt token above 0, or NaN")
        if np.any(rows["ids"] >= self._vocab_size):
            raise MalformedOutput("prompt_logprobs", f"a token outside the vocabulary of {self._vocab_size}")
        self._runs.append(run)

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its log-probability."""
        return self._end == len(self.token_ids)

    @property
    def _end(self) -> int:
        return self._runs[-1].end if self._runs else 1

    def table(self, offsets: Sequence[int]) -> LogprobTable:
        """Return all prompt tokens; ``offsets`` are where their texts begin."""
        table = LogprobTable()
        table.token_ids.extend(self.token_ids)
        table.offsets.extend(offsets)
        table.logprobs.append(math.nan)
        table.ends.append(0)
        for run in self._runs:
            rows = _rows(run)
            ends = table.ends[-1] + run.num_top * np.arange(1, len(rows) + 1)
            table.logprobs.frombytes(np.maximum(rows["own"], LOWEST).tobytes())
            table.ends.frombytes(ends.astype("<u4").tobytes())
            table.top_ids.frombytes(rows["ids"].tobytes())
            table.top_logprobs.frombytes(np.maximum(rows["top"], LOWEST).tobytes())
        return table

    def rows(self) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Yield log-probability, rank and top alternatives of each token but the first."""
        for run in self._runs:
            num_top = run.num_top
            for own, rank, *top in struct.iter_unpack(f"<fI{num_top}I{num_top}f", run.table):
                values = [max(value, LOWEST) for value in top[num_top:]]
                yield max(own, LOWEST), rank, list(zip(top[:num_top], values, strict=True))


def _rows(run: PromptLogprobs) -> np.ndarray:
    """Return the fields of each token: own, rank, ids and top."""
    top = (run.num_top,)
    return np.frombuffer(run.table, [("own", "<f4"), ("rank", "<u4"), ("ids", "<u4", top), ("top", "<f4", top)])
