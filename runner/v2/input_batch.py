"""The batch of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdserve.records import ScheduledSequence
from runner.v2.cuda_graphs import BatchDescriptor
from runner.v2.sampling_metadata import GrammarMaskTensors, SamplingMetadata
from runner.v2.staged_writes import StepWords

# The arrays of ``InputBatch.sent``.
SLOTS, QUERY_STARTS, SAMPLE_OF_ROW, LAST_TOKENS = range(4)


@dataclass
class BatchIndices:
    """Index arrays that stay the same from step to step while the same sequences decode."""

    slots: NDArray[np.int32]  # [num_seqs]
    lengths: NDArray[np.int32]  # [num_seqs]: tokens of this step
    query_starts: NDArray[np.int32]  # [num_seqs + 1]
    sampling: NDArray[np.int64]  # rows that sample
    sampled: tuple[ScheduledSequence, ...]  # their sequences
    last_tokens: NDArray[np.int32]  # of the rows that sample
    sample_of_row: NDArray[np.int32]  # [num_seqs]: the sample that continues the sequence, -1 if this rank has none
    metadata: SamplingMetadata | None = None  # from the first step that samples here

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def descriptor(self) -> BatchDescriptor:
        """The size without padding."""
        return BatchDescriptor(self.num_seqs, self.num_tokens)

    @property
    def every_token_samples(self) -> bool:
        return self.num_tokens == len(self.sampling)


@dataclass
class InputBatch:
    """The sequences of one step, on the host, and the step's words on the device."""

    indices: BatchIndices
    seq_lens: NDArray[np.int32]  # [num_seqs], with this step's tokens
    longest: int  # tokens of the longest sequence, with the token that this step samples
    sent: StepWords
    masks: GrammarMaskTensors | None = None

    @property
    def last_tokens(self) -> Tensor:
        """The last token of each row that samples, as an index into the tokens of the step; on the device."""
        return self.sent.array(LAST_TOKENS, len(self.indices.last_tokens))
