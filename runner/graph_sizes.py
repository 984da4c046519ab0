"""The sizes of steps that run as CUDA graphs. All that follows from them asks here.

| size of a step   | launch                         | who asks                                                    |
|------------------|--------------------------------|-------------------------------------------------------------|
| has a graph      | one call                       | v2/forward.py captures and finds graphs                     |
| has none         | layer by layer, tens of ms     | warmup.py compiles; launches_by_layer (pdserve/protocols.py) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.records import StepPlan

# Tokens of small steps with prompts, by the most sequences in them. Products of 448 tokens take longer than of 512.
# Above 512 tokens the time to launch no longer shows on a GPU.
_MIXED = {16: (32, 64, 96, 128, 192, 256, 320, 384, 512), 128: (192, 256, 320, 384, 512)}


class BatchDescriptor(NamedTuple):
    """The size that a batch is padded to."""

    rows: int
    tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token."""
        return self.rows == self.tokens


@dataclass(frozen=True)
class GraphSizes:
    descriptors: tuple[BatchDescriptor, ...]  # the largest first

    @classmethod
    def within(cls, max_num_seqs: int, max_batch_tokens: int) -> GraphSizes:
        """Return the sizes of all graphs of a runner with these limits."""
        decode = [size for size in (1, 2, 4) if size < max_num_seqs] + list(range(8, max_num_seqs, 8)) + [max_num_seqs]
        mixed = {(min(rows, max_num_seqs), tokens) for rows, tokens_of in _MIXED.items() for tokens in tokens_of}
        sizes = [(size, size) for size in decode]
        sizes += [(rows, tokens) for rows, tokens in sorted(mixed) if rows < tokens <= max_batch_tokens]
        return cls(tuple(BatchDescriptor(*each) for each in sorted(sizes, key=lambda size: -size[1])))

    @property
    def most_tokens(self) -> int:
        return max((each.tokens for each in self.descriptors), default=0)

    @property
    def most_mixed_tokens(self) -> int:
        """Tokens of the largest step with prompts that has a graph."""
        return max((each.tokens for each in self.descriptors if not each.is_decode), default=0)

    def find(self, rows: int, tokens: int) -> BatchDescriptor | None:
        """Return the smallest size that holds such a step, None if there is none."""
        is_decode = BatchDescriptor(rows, tokens).is_decode
        fitting = (
            each
            for each in self.descriptors
            if each.rows >= rows and each.tokens >= tokens and each.is_decode == is_decode
        )
        return min(fitting, key=lambda each: (each.tokens, each.rows), default=None)

    def have(self, plan: StepPlan) -> bool:
        """Whether one of them holds this step."""
        return self.find(len(plan.scheduled), plan.num_tokens) is not None
