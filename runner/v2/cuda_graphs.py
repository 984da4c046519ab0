"""Small steps as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from runner.graph_sizes import BatchDescriptor, GraphSizes


@dataclass
class CudaGraphs:
    """Captured graphs by batch size. Without any, every step runs eagerly."""

    sizes: GraphSizes
    _graphs: dict[BatchDescriptor, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def capture(
        self,
        prepare: Callable[[BatchDescriptor], None],
        forward: Callable[[BatchDescriptor], None],
        on_progress: Callable[[float], None],
    ) -> None:
        """Capture ``forward(descriptor)`` for every size, the largest first: smaller ones fit into its memory pool.

        ``prepare(descriptor)`` is called before each and may compute on the device; ``forward`` must not wait for it.
        """
        descriptors = self.sizes.descriptors
        if not descriptors:
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        gc.collect()
        for done, descriptor in enumerate(descriptors):
            on_progress(done / len(descriptors))
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
