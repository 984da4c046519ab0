"""The sizes of steps that run as CUDA graphs. Code that depends on them asks here.

| size of a step   | launch                         | asked by                                                    |
|------------------|--------------------------------|-------------------------------------------------------------|
| has a graph      | one call                       | v2/forward.py captures and finds graphs                     |
| has none         | layer by layer, tens of ms     | warmup.py compiles; launches_by_layer (pdserve/protocols.py) |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.config.node_config import NodeConfig
from pdserve.kv.layout import FP8_E4M3
from pdserve.records import StepPlan

# Sequences and tokens of small steps with prompts. Products of 448 tokens take longer than of 512.
_MIXED = ((16, 32), (16, 64), (16, 96), (16, 128), (256, 192), (256, 256), (256, 320), (256, 384), (256, 512))

# Sequences and tokens of larger steps, where FA3 attends in graphs. An 8B model takes 12 to 27 ms to launch layer by
# layer, and an H200 24 ms to compute 1,024 tokens. Attention by Triton would cost more than the launch: 256 tokens
# behind 3,000, beside 64 decodes, take 16 ms with FA3, else 19.5; behind 9,000 tokens 19 and 27. The ITL target of such
# a model lets steps have up to 1,408 tokens.
_LARGE_MIXED = tuple((256, tokens) for tokens in range(640, 1408 + 1, 128))

_HOPPER = 9  # major compute capability; FA3 runs on no other

# Tokens of a prompt that begins behind a handoff: the first one, and three that P decoded ahead. A step holds two such
# prompts beside decodes. In a mixed graph it takes 3 ms longer (8B and gpt-oss-20b, one H200).
_HANDED_OFF = 4

# Tokens of the largest decode step with drafts that has a graph of its own: larger batches gain little from drafts.
_MOST_DRAFTED = 512


def _rows_below(limit: int) -> Iterator[int]:
    """Yield the rows of graphs of decode steps, below ``limit``. Each graph adds 25 ms to a node's start (8B, an H100).

    Above 64 rows, padding adds at most a quarter: steps of 16 from 64 on, 32 from 128, 64 from 256. Padded rows read no
    keys. Up to about 300 rows, the operations per byte of an H100, products take the time to read their weights.
    """
    rows = 1
    while rows < limit:
        yield rows
        rows += rows if rows < 8 else 8 if rows < 64 else 1 << (rows.bit_length() - 3)


def _fa3_attends_in_graphs(config: NodeConfig) -> bool:
    """See ``PagedFlashInferAttention``."""
    model = config.model
    capability = config.device.capability
    return (
        config.attention_backend == "flashinfer"
        and capability is not None
        and capability[0] == _HOPPER
        and model.latent is None
        and not any(spec.has_sinks for spec in model.attention)
        and config.kv_layout.dtype != FP8_E4M3
    )


class BatchDescriptor(NamedTuple):
    """The size of a batch, or the one to which it is padded."""

    rows: int
    tokens: int
    row_tokens: int = 0  # most tokens of a sequence: 1 in a decode step, 1 and drafts, or _HANDED_OFF; 0: any number

    @property
    def longest(self) -> int:
        """The most tokens that a sequence can have."""
        return self.row_tokens or self.tokens

    @property
    def is_decode(self) -> bool:
        """Whether its graph leaves logits of all tokens."""
        return self.row_tokens > 0


@dataclass(frozen=True)
class GraphSizes:
    descriptors: tuple[BatchDescriptor, ...]  # the largest first

    @classmethod
    def of_node(cls, config: NodeConfig) -> GraphSizes:
        """Return the sizes of all graphs of a node's runner.

        Kernels of recurrent layers for more than a few tokens of a prompt cannot be captured.
        """
        mixed: tuple[tuple[int, int], ...] = () if config.model.state is not None else _MIXED
        if mixed and _fa3_attends_in_graphs(config):
            mixed += _LARGE_MIXED
        return cls.within(config.max_num_seqs, config.max_batch_tokens, mixed, config.max_drafts)

    @classmethod
    def within(
        cls,
        max_num_seqs: int,
        max_batch_tokens: int,
        mixed: Iterable[tuple[int, int]] = _MIXED,
        max_drafts: int = 0,
    ) -> GraphSizes:
        """Return the sizes of all graphs of a runner with these limits.

        ``mixed``: sequences and tokens of steps with long prompts.
        """
        decode = [*_rows_below(max_num_seqs), max_num_seqs]
        sizes = [BatchDescriptor(rows, rows, 1) for rows in decode]
        if max_drafts:
            drafted = [BatchDescriptor(rows, rows * (1 + max_drafts), 1 + max_drafts) for rows in decode]
            sizes += [size for size in drafted if size.tokens <= _MOST_DRAFTED]
        else:
            few = [rows for rows in decode if rows & (rows - 1) == 0 or rows == max_num_seqs]
            sizes += [
                BatchDescriptor(rows, rows + min((_HANDED_OFF - 1) * rows, 2 * _HANDED_OFF), _HANDED_OFF)
                for rows in few
            ]
        of_mixed = {(min(rows, max_num_seqs), tokens) for rows, tokens in mixed}
        sizes += [BatchDescriptor(*size) for size in sorted(of_mixed) if size[0] < size[1] <= max_batch_tokens]
        return cls(tuple(sorted(sizes, key=lambda size: -size.tokens)))

    @property
    def of_decodes(self) -> GraphSizes:
        """The sizes whose graphs leave logits of all tokens; with drafts these are decode steps."""
        return GraphSizes(tuple(descriptor for descriptor in self.descriptors if descriptor.is_decode))

    @property
    def most_tokens(self) -> int:
        return max((descriptor.tokens for descriptor in self.descriptors), default=0)

    @property
    def most_decode_tokens(self) -> int:
        """Tokens of the largest decode step that has a graph."""
        return max((descriptor.tokens for descriptor in self.descriptors if descriptor.is_decode), default=0)

    @property
    def most_mixed_tokens(self) -> int:
        """Tokens of the largest step with prompts that has a graph."""
        return max((descriptor.tokens for descriptor in self.descriptors if not descriptor.is_decode), default=0)

    def find(self, step: BatchDescriptor) -> BatchDescriptor | None:
        """Return the smallest size that holds a step of this size, None if there is none.

        ``step.row_tokens``: tokens of its longest sequence.
        """
        rows, tokens, row_tokens = step
        fitting = (
            descriptor
            for descriptor in self.descriptors
            if descriptor.rows >= rows
            and descriptor.tokens >= tokens
            and (not descriptor.row_tokens or descriptor.row_tokens >= row_tokens)
        )
        return min(fitting, key=lambda descriptor: (descriptor.tokens, descriptor.rows), default=None)

    def have(self, plan: StepPlan) -> bool:
        """Whether one of them holds this step."""
        tokens = [sequence.num_tokens for sequence in plan.scheduled]
        return self.find(BatchDescriptor(len(tokens), sum(tokens), max(tokens, default=0))) is not None
