"""Stub prefill and decode nodes: hundreds of gRPC services per process that report and answer like real nodes.

Each node sends load reports to its watchers several times per second, and the blocks of its prefix cache in the first
report. A decode node answers each request with one token; a prefill node accepts handshakes. There are no engines and
no handoffs, so the processes leave most of the CPU to the measured router or decode node.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc

from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel as rpc

MODEL = "many"
BLOCK_SIZE = 16
VOCABULARY = 4096

_LAYOUT = pb.KVLayout(
    num_blocks=50_000,
    block_size=BLOCK_SIZE,
    kernel_block_size=16,
    num_layers=6,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    spec="full_attention",
)
_THROUGHPUT = pb.Throughput(
    prompt=pb.LinearCost(base=4.8e-3, slope=24e-6),
    decode=pb.LinearCost(base=4.8e-3, slope=20e-6),
    read=pb.LinearCost(base=1e-3, slope=7e-7),
)


class Behaviour(NamedTuple):
    """Settings of all nodes of a bench."""

    num_prefill: int
    reports: float  # reports/s of each node
    blocks: int  # distinct blocks in each node's prefix cache


class Counters:
    """Totals over all nodes of a process."""

    reports = report_bytes = 0


class ManyNode(pb_grpc.NodeServicer, pb_grpc.DecodeNodeServicer, pb_grpc.PrefillNodeServicer):
    """One node with a unique ``number``."""

    def __init__(self, role: str, number: int, behaviour: Behaviour, counters: Counters) -> None:
        self._behaviour = behaviour
        self._counters = counters
        self._rng = random.Random(number)
        self._description = pb.NodeDescription(
            node_id=f"{role}-{number}",
            epoch=f"e{number}",
            role=role,
            state="ready",
            model=MODEL,
            version="bench",
            protocol=PROTOCOL_VERSION,
            compat_hash="same",
            runner="simulated",
            kv_layout=_LAYOUT,
            max_model_len=1 << 17,
            vocab_size=VOCABULARY,
        )
        if role == "decode":
            self._description.connected_peers.extend(f"prefill-{index}" for index in range(behaviour.num_prefill))

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        return self._description

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeReport]:
        pause = max(1.0 / self._behaviour.reports, request.pause_ms / 1000)
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        for sequence in itertools.count(1):
            report = pb.NodeReport(sequence=sequence, load=self._load())
            if sequence == 1:
                report.description.CopyFrom(self._description)
                report.cache.added = self._rng.randbytes(8 * self._behaviour.blocks)
            else:
                self._counters.reports += 1
                self._counters.report_bytes += report.ByteSize()
            yield report
            await asyncio.sleep(pause)

    def _load(self) -> pb.NodeLoad:
        running = self._rng.randrange(64)
        return pb.NodeLoad(
            free_blocks=50_000 - 100 * running,
            total_blocks=50_000,
            running=running,
            backlog=self._rng.randrange(20_000),
            throughput=_THROUGHPUT,
        )

    async def Serve(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Serve streams of both roles. A decode node answers with a single token."""
        async for message in request_iterator:
            if isinstance(message, pb.ServeRequest) and message.WhichOneof("kind") == "generate":
                number = message.generate.request
                output = pb.Output(request=number, token_id=300, has_token=True, finish_reason="length")
                yield pb.OutputBatch(outputs=[output])

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
        ours = self._description
        rank = pb.RankKV(agent=ours.node_id, metadata=b"simulated", num_bytes=1 << 30, device="cpu", layout=_LAYOUT)
        return pb.HandshakeReply(node_id=ours.node_id, epoch=ours.epoch, ranks=[rank])


class ManyNodes:
    """``num_prefill`` and ``num_decode`` nodes in child processes that end with this one."""

    def __init__(self, behaviour: Behaviour, num_decode: int, processes: int = 2) -> None:
        roles = ["prefill"] * behaviour.num_prefill + ["decode"] * num_decode
        members = [list(enumerate(roles))[index::processes] for index in range(processes)]
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for mine in members:
            ours, theirs = context.Pipe()
            process = context.Process(target=_host, args=(mine, behaviour, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        ports = [pair for pipe in self._pipes for pair in pipe.recv()]
        self.addresses = {
            role: [f"127.0.0.1:{port}" for of, port in ports if of == role] for role in ("prefill", "decode")
        }

    def counts(self) -> tuple[int, int]:
        """Return the number of reports so far without the first of each stream, and their bytes."""
        for pipe in self._pipes:
            pipe.send("counts")
        reports, sizes = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return sum(reports), sum(sizes)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _host(members: Sequence[tuple[int, str]], behaviour: Behaviour, pipe: Connection) -> None:
    asyncio.run(_serve(members, behaviour, pipe))


async def _serve(members: Sequence[tuple[int, str]], behaviour: Behaviour, pipe: Connection) -> None:
    counters = Counters()
    servers = []
    ports = []
    for number, role in members:
        server = grpc.aio.server(options=rpc.server_options())
        node = ManyNode(role, number, behaviour, counters)
        pb_grpc.add_NodeServicer_to_server(node, server)
        if role == "decode":
            pb_grpc.add_DecodeNodeServicer_to_server(node, server)
        else:
            pb_grpc.add_PrefillNodeServicer_to_server(node, server)
        ports.append((role, rpc.bind(server, "127.0.0.1", 0)))
        await server.start()
        servers.append(server)
    pipe.send(ports)
    while True:
        if pipe.poll():
            pipe.recv()
            pipe.send((counters.reports, counters.report_bytes))
        await asyncio.sleep(0.02)
