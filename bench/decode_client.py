"""A client of a decode node for benches: sends prompts as a router does and records the time of each token."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel as rpc
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams


class DecodeClient:
    """A router's stream to a decode node, with any number of concurrent prompts."""

    def __init__(
        self, node: pb.NodeDescription, node_stub: pb_grpc.NodeAsyncStub, stub: pb_grpc.DecodeNodeAsyncStub
    ) -> None:
        self.node = node
        self._node_stub = node_stub
        self._requests: asyncio.Queue[pb.ServeRequest] = asyncio.Queue()
        self._outputs: grpc.aio.StreamStreamCall[pb.ServeRequest, pb.OutputBatch] = stub.Serve(self._send())
        self._waiting: dict[int, tuple[list[float], int, asyncio.Future[None]]] = {}
        self._number = 0

    @property
    def prefill_node(self) -> str:
        """The decode node's first connected prefill node. Raises RuntimeError if there is none."""
        if not self.node.connected_peers:
            raise RuntimeError(f"decode node {self.node.node_id} has no prefill node; start it with --prefill ADDR")
        return str(self.node.connected_peers[0])

    async def counter(self, name: str) -> float:
        """Return the node's value of a series of docs/metrics.md."""
        return (await self._node_stub.Status(pb.StatusRequest())).counters[name]

    async def token_times(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        prefill_node: str = "",
        times: list[float] | None = None,
        prefix_tokens: int = 0,
    ) -> list[float]:
        """Generate ``num_tokens`` greedy tokens; return the time.perf_counter() of each arrival, also in ``times``.

        An empty ``prefill_node`` means prefill on D. With ``prefix_tokens``, P pulls that many leading tokens from D.
        Raises RuntimeError if the request fails. Cancelling the task cancels the request.
        """
        self._number += 1
        times = [] if times is None else times
        number = self._number
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = times, num_tokens, done
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        generate = pb.Generate(
            request=number,
            token_ids=pack_tokens(list(token_ids)),
            sampling=sampling_to_pb(sampling),
            prefill_node=prefill_node,
            prefix_node=self.node.node_id if prefix_tokens else "",
            prefix_tokens=prefix_tokens,
        )
        self._requests.put_nowait(pb.ServeRequest(generate=generate))
        try:
            await done
        except asyncio.CancelledError:
            self._waiting.pop(number, None)  # the request may have ended meanwhile
            self._requests.put_nowait(pb.ServeRequest(cancel=pb.Cancel(request=number)))
            raise
        return times

    async def read(self) -> None:
        """Receive outputs until the stream ends; unfinished requests then fail."""
        while isinstance(batch := await self._outputs.read(), pb.OutputBatch):
            now = time.perf_counter()
            for output in batch.outputs:
                self._take(output, now)
        for _, _, done in self._waiting.values():
            done.set_exception(RuntimeError("the decode node ended the stream"))

    def _take(self, output: pb.Output, now: float) -> None:
        if output.request not in self._waiting:
            return  # cancelled
        times, num_tokens, done = self._waiting[output.request]
        times += [now] * output.has_token
        if output.HasField("failure"):
            done.set_exception(RuntimeError(output.failure.message))
        elif len(times) == num_tokens:
            done.set_result(None)
        if done.done():
            del self._waiting[output.request]

    async def _send(self) -> AsyncIterator[pb.ServeRequest]:
        while True:
            yield await self._requests.get()


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[DecodeClient]:
    """Connect to the decode node at ``address``."""
    async with rpc.open_channel(address) as channel:
        stub: pb_grpc.NodeAsyncStub = pb_grpc.NodeStub(channel)
        node = await stub.Describe(pb.DescribeRequest())
        client = DecodeClient(node, stub, pb_grpc.DecodeNodeStub(channel))
        reader = asyncio.create_task(client.read())
        try:
            yield client
        finally:
            reader.cancel()


def run_bench(work: Coroutine[Any, Any, object]) -> int:
    """Run a bench and return its exit status; print an error to stderr."""
    try:
        asyncio.run(work)
    except (grpc.RpcError, RuntimeError) as exc:
        text = exc.details() if isinstance(exc, grpc.aio.AioRpcError) else exc
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
        return 1
    return 0
