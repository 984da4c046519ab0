"""CPU time of the router per streamed token, from gRPC to the client's socket.

    python bench/router_stream.py --streams 1 32 256

A stub decode node replays tokens to a real router; like a real node it sends one message per step for all streams. It
runs in its own process. Clients read the streams to the end. CPU time is user + system time of the router process from
the first request to the end of all streams. The time of the event loop's thread is also reported separately, because
this thread limits the throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel as rpc

MODEL = "replay"


class ReplayNode(pb_grpc.DecodeNodeServicer, pb_grpc.NodeServicer):
    """Waits for all streams, then sends each of them a token every ``interval`` seconds."""

    def __init__(self, name: str, num_streams: int, interval: float) -> None:
        self._name = name
        self._num_streams = num_streams
        self._interval = interval

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        return pb.NodeDescription(
            node_id=self._name,
            epoch="1",
            role="decode",
            state="ready",
            protocol=PROTOCOL_VERSION,
            model=MODEL,
            max_model_len=8192,
            vocab_size=4096,
        )

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeReport]:
        description = await self.Describe(pb.DescribeRequest(), context)
        for sequence in itertools.count(1):
            yield pb.NodeReport(sequence=sequence, description=description)
            await asyncio.sleep(1.0)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus()

    async def Serve(self, requests: AsyncIterator[pb.ServeRequest], context: Any) -> AsyncIterator[pb.OutputBatch]:
        while True:
            running: list[pb.Generate] = []
            async for request in requests:
                if request.WhichOneof("kind") == "generate":
                    running.append(request.generate)
                if len(running) == self._num_streams:
                    break
            for step in range(num_tokens := running[0].sampling.max_tokens):
                finish = "length" if step == num_tokens - 1 else ""
                token_id = 300 + step % 3000
                yield pb.OutputBatch(
                    outputs=[
                        pb.Output(request=r.request, token_id=token_id, has_token=True, finish_reason=finish)
                        for r in running
                    ]
                )
                await asyncio.sleep(self._interval)


def run_nodes(num_nodes: int, num_streams: int, interval: float, pipe: Any) -> None:
    """Run nodes with ``num_streams`` streams each; send their ports over ``pipe``."""

    async def serve() -> None:
        servers = []
        ports = []
        for index in range(num_nodes):
            servers.append(grpc.aio.server(options=rpc.server_options()))
            node = ReplayNode(f"replay{index}", num_streams, interval)
            pb_grpc.add_DecodeNodeServicer_to_server(node, servers[-1])
            pb_grpc.add_NodeServicer_to_server(node, servers[-1])
            ports.append(rpc.bind(servers[-1], "127.0.0.1", 0))
            await servers[-1].start()
        pipe.send(ports)
        await servers[0].wait_for_termination()

    asyncio.run(serve())


async def read_stream(port: int, num_tokens: int, chat: bool) -> int:
    """Read a stream to its end and return its bytes."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    body = json.dumps({**prompt, "max_tokens": num_tokens, "stream": True}).encode()
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (path, len(body)))
    writer.write(body)
    size = 0
    while data := await reader.read(1 << 16):
        size += len(data)
    writer.close()
    return size


def measure(num_streams: int, num_nodes: int, num_tokens: int, interval: float, chat: bool) -> dict[str, float]:
    """Start the processes, run all streams once, and return the figures."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    node = context.Process(target=run_nodes, args=(num_nodes, num_streams // num_nodes, interval, theirs), daemon=True)
    node.start()
    status, child_status = os.pipe()
    argv = [sys.executable, "-m", "router", str(EMBEDDED_MODEL), "--served-model-name", MODEL, "--port", "0"]
    argv += [flag for port in ours.recv() for flag in ("--decode", f"127.0.0.1:{port}")]
    argv += ["--status-fd", str(child_status)]
    router = subprocess.Popen(argv, pass_fds=[child_status], stderr=subprocess.DEVNULL)
    os.close(child_status)
    try:
        port = 0
        with os.fdopen(status) as lines:
            for line in lines:
                state = json.loads(line)
                port = int(state["address"].rpartition(":")[2]) if state["state"] == "listening" else port
                if state["state"] == "ready":
                    break
        process = psutil.Process(router.pid)

        async def clients() -> None:
            await asyncio.gather(*(read_stream(port, num_tokens, chat) for _ in range(num_streams)))

        before = _cpu_seconds(process)
        started = time.perf_counter()
        asyncio.run(clients())
        after = _cpu_seconds(process)
        seconds = time.perf_counter() - started
    finally:
        router.terminate()
        router.wait()
        node.terminate()
        node.join()
    total = num_streams * num_tokens
    of_all, of_loop = (1e6 * (late - early) / total for early, late in zip(before, after, strict=True))
    return {
        "streams": num_streams,
        "us_per_token": of_all,
        "us_of_loop": of_loop,
        "nodes": num_nodes,
        "tokens_per_s": total / seconds,
    }


def _cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """Return the CPU seconds of all threads, and of the event loop's thread."""
    threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return sum(threads.values()), threads[process.pid]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--nodes", type=int, default=1, help="nodes that share the streams")
    parser.add_argument("--tokens", type=int, default=1000, help="per stream")
    parser.add_argument("--interval", type=float, default=0.005, help="seconds between steps")
    parser.add_argument("--completions", action="store_true", help="stream completions instead of chats")
    args = parser.parse_args()
    for num_streams in args.streams:
        result = measure(num_streams, args.nodes, args.tokens, args.interval, not args.completions)
        print(json.dumps({name: round(value, 1) for name, value in result.items()}), flush=True)


if __name__ == "__main__":
    main()
