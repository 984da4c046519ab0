"""Small steps as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from runner.graph_sizes import BatchDescriptor, GraphSizes

PreparedT = TypeVar("PreparedT")


@dataclass
class CudaGraphs:
    """Captured graphs by batch size. Without any, every step runs eagerly."""

    sizes: GraphSizes
    _replays: dict[BatchDescriptor, Callable[[], None]] = field(default_factory=dict)

    def capture(
        self,
        device: torch.device,
        prepare: Callable[[BatchDescriptor], PreparedT],
        forward: Callable[[BatchDescriptor, PreparedT], None],
        on_progress: Callable[[float], None],
    ) -> None:
        """Capture ``forward(descriptor, prepare(descriptor))`` for every size, the largest first.

        Smaller ones fit into the memory pool of the largest. ``prepare`` may compute on the device; ``forward`` must
        not wait for it, and reads and writes memory at fixed addresses only. On a CPU, for tests, nothing is captured:
        a replay calls ``forward`` again.
        """
        descriptors = self.sizes.descriptors
        if device.type == "cpu":
            self._replays = {
                descriptor: partial(forward, descriptor, prepare(descriptor)) for descriptor in descriptors
            }
            return
        if not descriptors:
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        gc.collect()
        for done, descriptor in enumerate(descriptors):
            on_progress(done / len(descriptors))
            prepared = prepare(descriptor)
            forward(descriptor, prepared)  # compiles and allocates whatever the first use needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls may break the capture: a thread of NCCL queries the device now and then.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                forward(descriptor, prepared)
            self._replays[descriptor] = graph.replay

    def have(self, descriptor: BatchDescriptor) -> bool:
        return descriptor in self._replays

    def replay(self, descriptor: BatchDescriptor) -> None:
        self._replays[descriptor]()
