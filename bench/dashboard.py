"""CPU cost of the dashboard on a router.

    PYTHONPATH=.:tests python bench/dashboard.py --nodes 64 --seconds 10

A router has ``--nodes`` nodes; half of them are prefill nodes, and each decode node has counters for all of these. The
nodes are idle and answer Status with as many counters as real nodes. CPU is user + system time of the router process
over wall time, without and with a viewer that sends the page's request every second.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

import grpc.aio
import httpx
import psutil
from fleet import MODEL_NAME, Fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.metrics import series
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel as rpc
from router.dashboard.live import STATE_PATH

PEER_COUNTERS = ("reads", "read_failures", "read_bytes", "read_descriptors", "read_seconds", "checksum_failures")
OTHER_COUNTERS = 40  # counters without a peer label


class IdleNode(pb_grpc.NodeServicer, pb_grpc.DecodeNodeServicer):
    def __init__(self, role: str, name: str, peers: list[str]) -> None:
        self.description = pb.NodeDescription(
            node_id=name, epoch="1", role=role, state="ready", model=MODEL_NAME, max_model_len=1000, vocab_size=4096
        )
        self.counters = {f"pdserve_counter_{index}_total": float(index) for index in range(OTHER_COUNTERS)}
        for peer in peers:
            self.counters |= {series(f"pdserve_kv_{counter}_total", peer=peer): 1.0 for counter in PEER_COUNTERS}
            self.counters[series("pdserve_peer_connected", peer=peer, transport="rdma")] = 1.0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        return self.description

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeReport]:
        sequence = 0
        while True:
            sequence += 1
            load = pb.NodeLoad(free_blocks=100, total_blocks=100)
            yield pb.NodeReport(sequence=sequence, description=self.description if sequence == 1 else None, load=load)
            await asyncio.sleep(1.0)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus(counters=self.counters)

    async def Serve(self, requests: AsyncIterator[pb.ServeRequest], context: Any) -> AsyncIterator[pb.OutputBatch]:
        async for _ in requests:
            yield pb.OutputBatch()


async def start(node: IdleNode) -> tuple[grpc.aio.Server, str]:
    """Start a server for a node; return it and its address."""
    server = grpc.aio.server(options=rpc.server_options())
    pb_grpc.add_NodeServicer_to_server(node, server)
    pb_grpc.add_DecodeNodeServicer_to_server(node, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def cpu(process: psutil.Process, seconds: float, url: str | None) -> float:
    """Return the CPU seconds per second of a process while a client sends GET ``url`` every second."""
    last_seen: dict[str, Any] = {}
    async with httpx.AsyncClient(trust_env=False) as client:

        async def one_second() -> None:
            if url is not None:
                answer = (await client.get(url, params=last_seen)).json()
                seconds = answer["history"]["seconds"] or [last_seen["second"]]
                last_seen["epoch"], last_seen["second"] = answer["epoch"], seconds[-1]
            await asyncio.sleep(1.0)

        for _ in range(3):  # afterwards the router has called Status of all nodes twice
            await one_second()
        before, began = process.cpu_times(), perf_counter()
        while perf_counter() - began < seconds:
            await one_second()
        after, passed = process.cpu_times(), perf_counter() - began
    return float(after.user + after.system - before.user - before.system) / passed


async def run(num_nodes: int, seconds: float) -> None:
    prefills = [await start(IdleNode("prefill", f"p{index}", [])) for index in range(num_nodes // 2)]
    peers = [address for _, address in prefills]
    decodes = [await start(IdleNode("decode", f"d{index}", peers)) for index in range(num_nodes // 2)]
    flags = [word for _, address in prefills for word in ("--prefill", address)]
    flags += [word for _, address in decodes for word in ("--decode", address)]
    with Fleet() as fleet:
        router = fleet.start_router(EMBEDDED_MODEL, flags)
        await asyncio.to_thread(fleet.wait_ready)
        process, url = psutil.Process(router.pid), fleet.url + STATE_PATH
        print(f"no viewer:    {1000 * await cpu(process, seconds, None):.1f} ms of CPU per second")
        print(f"one viewer:   {1000 * await cpu(process, seconds, url):.1f} ms of CPU per second")
        async with httpx.AsyncClient(trust_env=False) as client:
            whole = (await client.get(url)).json()
            print(f"answer size:  {len((await client.get(url, params=latest(whole))).content) / 1000:.1f} kB")
    for server, _ in (*prefills, *decodes):
        await server.stop(None)


def latest(report: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": report["epoch"], "second": report["history"]["seconds"][-1]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    asyncio.run(run(args.nodes, args.seconds))


if __name__ == "__main__":
    main()
