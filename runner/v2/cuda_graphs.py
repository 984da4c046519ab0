"""Small steps as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Tokens of small steps with prompts, by the most sequences in them. Products of 448 tokens take longer than of 512.
_MIXED = {16: (32, 64, 96, 128, 192, 256, 320, 384, 512), 128: (192, 256, 320, 384, 512)}


class BatchDescriptor(NamedTuple):
    """The size that a batch is padded to."""

    rows: int
    tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token."""
        return self.rows == self.tokens


def decode_descriptors(max_num_seqs: int) -> tuple[BatchDescriptor, ...]:
    """Return sizes of steps with one token per sequence: 1, 2, 4, multiples of 8, and ``max_num_seqs``."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs] + list(range(8, max_num_seqs, 8)) + [max_num_seqs]
    return tuple(BatchDescriptor(size, size) for size in sizes)


def mixed_descriptors(max_num_seqs: int, max_batch_tokens: int) -> tuple[BatchDescriptor, ...]:
    """Return sizes of small steps with prompts. Above 512 tokens the time to launch no longer shows on a GPU."""
    sizes = {(min(rows, max_num_seqs), tokens) for rows, tokens_of in _MIXED.items() for tokens in tokens_of}
    return tuple(BatchDescriptor(*each) for each in sorted(sizes) if each[0] < each[1] <= max_batch_tokens)


@dataclass
class CudaGraphs:
    """Captured graphs by batch size. Without any, every step runs eagerly."""

    descriptors: tuple[BatchDescriptor, ...]
    _graphs: dict[BatchDescriptor, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def find(self, rows: int, tokens: int) -> BatchDescriptor | None:
        """Return the smallest captured size that holds such a step, None if there is none."""
        is_decode = BatchDescriptor(rows, tokens).is_decode
        fitting = (
            each
            for each in self.descriptors
            if each.rows >= rows and each.tokens >= tokens and each.is_decode == is_decode
        )
        return min(fitting, key=lambda each: (each.tokens, each.rows), default=None)

    def capture(
        self,
        prepare: Callable[[BatchDescriptor], None],
        forward: Callable[[BatchDescriptor], None],
        on_progress: Callable[[float], None],
    ) -> None:
        """Capture ``forward(descriptor)`` for every size, the largest first: smaller ones fit into its memory pool.

        ``prepare(descriptor)`` is called before each and may compute on the device; ``forward`` must not wait for it.
        """
        if not self.descriptors:
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        gc.collect()
        for done, descriptor in enumerate(sorted(self.descriptors, key=lambda each: -each.tokens)):
            on_progress(done / len(self.descriptors))
            prepare(descriptor)
            forward(descriptor)  # compiles and allocates whatever the first use needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls may break the capture: a thread of NCCL queries the device now and then.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                forward(descriptor)
            self._graphs[descriptor] = graph

    def replay(self, descriptor: BatchDescriptor) -> None:
        self._graphs[descriptor].replay()
