"""Decode steps as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


def padded_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that graphs are captured for: 1, 2, 4, multiples of 8, and the largest."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs] + list(range(8, max_num_seqs, 8))
    return (*sizes, max_num_seqs)


@dataclass
class DecodeGraphs:
    """Graphs by batch size. ``sizes`` is empty where none are wanted: then every step runs as it is."""

    sizes: tuple[int, ...]
    _graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured size that holds ``num_seqs``, None if there is none."""
        return next((size for size in self.sizes if size >= num_seqs), None)

    def capture(
        self, prepare: Callable[[int], None], forward: Callable[[int], None], progress: Callable[[float], None]
    ) -> None:
        """Capture ``forward(size)`` for every size, the largest first: the smaller ones fit into its memory pool.

        ``prepare(size)`` is called before each and may compute on the device; ``forward`` must not wait for it.
        """
        if not self.sizes:
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        gc.collect()
        for done, size in enumerate(reversed(self.sizes)):
            progress(done / len(self.sizes))
            prepare(size)
            forward(size)  # what is compiled or allocated at first use happens here
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                forward(size)
            self._graphs[size] = graph

    def replay(self, size: int) -> None:
        self._graphs[size].replay()
