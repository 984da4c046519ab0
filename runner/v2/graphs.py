"""Small steps as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_MIXED_ROWS = 16  # sequences of a small step with prompts in it
_MIXED_TOKENS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512)


class StepShape(NamedTuple):
    """What a step is padded to."""

    rows: int
    tokens: int

    @property
    def singles(self) -> bool:
        """Whether every sequence has one token."""
        return self.rows == self.tokens


def decode_shapes(max_num_seqs: int) -> tuple[StepShape, ...]:
    """Steps of one token per sequence: 1, 2, 4, multiples of 8, and the most that there can be."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs] + list(range(8, max_num_seqs, 8)) + [max_num_seqs]
    return tuple(StepShape(size, size) for size in sizes)


def mixed_shapes(max_num_seqs: int, max_batch_tokens: int) -> tuple[StepShape, ...]:
    """Small steps with prompts: above 512 tokens a GPU has so much to do that launching is no longer felt."""
    rows = min(_MIXED_ROWS, max_num_seqs)
    return tuple(StepShape(rows, tokens) for tokens in _MIXED_TOKENS if rows < tokens <= max_batch_tokens)


@dataclass
class StepGraphs:
    """Graphs by shape. Without shapes every step runs as it is."""

    shapes: tuple[StepShape, ...]
    _graphs: dict[StepShape, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def shape_for(self, rows: int, tokens: int) -> StepShape | None:
        """The smallest captured shape that holds such a step, None if there is none."""
        singles = StepShape(rows, tokens).singles
        fitting = (
            shape for shape in self.shapes if shape.rows >= rows and shape.tokens >= tokens and shape.singles == singles
        )
        return min(fitting, key=lambda shape: shape.tokens, default=None)

    def capture(
        self,
        prepare: Callable[[StepShape], None],
        forward: Callable[[StepShape], None],
        on_progress: Callable[[float], None],
    ) -> None:
        """Capture ``forward(shape)`` for every shape, the largest first: the smaller ones fit into its memory pool.

        ``prepare(shape)`` is called before each and may compute on the device; ``forward`` must not wait for it.
        """
        if not self.shapes:
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        gc.collect()
        for done, shape in enumerate(sorted(self.shapes, key=lambda shape: -shape.tokens)):
            on_progress(done / len(self.shapes))
            prepare(shape)
            forward(shape)  # what is compiled or allocated at first use happens here
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls count: one of NCCL's asks the device now and then how far it is.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                forward(shape)
            self._graphs[shape] = graph

    def replay(self, shape: StepShape) -> None:
        self._graphs[shape].replay()
