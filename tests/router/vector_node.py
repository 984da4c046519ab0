"""A prefill node that pools: its vectors are a digest of each prompt, and tests can make it fail or wait."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from scripted_node import ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import pack_tokens


class VectorNode(ScriptedNode, pb_grpc.PoolingNodeServicer):
    def __init__(self, model: str, task: str, size: int, node_id: str, **pooling: bool) -> None:
        self.calls: list[pb.PoolRequest] = []
        self.cancelled = 0  # calls
        self.released = asyncio.Event()  # cleared: calls wait
        self.released.set()
        self.failures: list[tuple[grpc.StatusCode, str]] = []  # errors of the next calls, in order
        self.size = size
        super().__init__(model, node_id=node_id)
        self.description.role = "prefill"
        self.description.task = task
        self.description.pooling.CopyFrom(pb.Pooling(size=size, **pooling))

    def add_services(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PoolingNodeServicer_to_server(self, server)
        pb_grpc.add_NodeServicer_to_server(self, server)

    async def Pool(self, request: pb.PoolRequest, context: Any) -> pb.PoolReply:
        self.calls.append(request)
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failures:
            await context.abort(*self.failures.pop(0))
        size = request.dimensions or self.size
        return pb.PoolReply(
            vectors=[
                vector_of(prompt, self.size, self.description.weights)[:size].tobytes() for prompt in request.prompts
            ],
            cached_tokens=[1] * len(request.prompts),
            weights=self.description.weights,
        )

    def num_prompts(self) -> int:
        return sum(len(call.prompts) for call in self.calls)


def vector_of(prompt: bytes | Sequence[int], size: int, weights: str = "") -> NDArray[np.float32]:
    """Return values in -1 … 1 that depend on all token ids and the weights, little-endian."""
    packed = prompt if isinstance(prompt, bytes) else pack_tokens(prompt)
    drawn = hashlib.shake_128(packed + weights.encode()).digest(4 * size)
    return ((np.frombuffer(drawn, "<u4") / 2**31) - 1).astype("<f4")
