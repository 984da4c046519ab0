"""Changes the weights of nodes, or has them sleep and wake: one after the other, each once the one before is done."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc

from pdserve.errors import ConfigError, NodeError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.address import split_address
from pdserve.rpc.channel import open_channel
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.tls import PeerTls

_PIECE = 256 << 10  # bytes; every node takes a message of this size (pdserve/rpc/message_limits.py)
_DESCRIBE_SECONDS = 10.0

Change = Callable[[grpc.aio.Channel], Awaitable[pb.WeightsChanged]]


def weights(args: argparse.Namespace) -> int:
    """Run ``pdserve weights``. Raises the error of the first node that fails; later ones are not asked."""
    tls = None if args.grpc_tls is None else PeerTls(args.grpc_tls)
    for address in args.nodes:
        split_address(address)
    match args.action:
        case "show":
            asyncio.run(_show(args.nodes, tls))
        case "reload":
            asyncio.run(_change(args.nodes, tls, _reload(args.model, args.when), args.pause))
        case "sleep":
            asyncio.run(_change(args.nodes, tls, _sleep(args.when)))
        case "wake":
            asyncio.run(_change(args.nodes, tls, _wake(args.model)))
        case "patch":
            asyncio.run(_change(args.nodes, tls, _patch(Path(args.file), args.when), args.pause))
    return 0


async def _show(nodes: list[str], tls: PeerTls | None) -> None:
    for address in nodes:
        async with open_channel(address, tls=tls) as channel:
            node = await _describe(channel, address)
        print(f"{address}  {node.role:<8} {node.state:<16} weights {node.weights or '-'}  epoch {node.epoch}")


async def _describe(channel: grpc.aio.Channel, address: str) -> pb.NodeDescription:
    stub = pb_grpc.NodeStub(channel)
    try:
        return await stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_SECONDS, wait_for_ready=True)
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"{address} does not answer within {_DESCRIBE_SECONDS:g} s; check that a node listens there"
            raise NodeError(text) from exc
        raise NodeError(str(error_from_rpc(exc, address))) from exc


async def _change(nodes: list[str], tls: PeerTls | None, change: Change, pause: float = 0.0) -> None:
    for done, address in enumerate(nodes):
        await asyncio.sleep(pause if done else 0.0)
        async with open_channel(address, tls=tls) as channel:
            await _describe(channel, address)  # waits for the connection, which a busy node may not accept at once
            try:
                changed = await change(channel)
            except grpc.aio.AioRpcError as exc:
                error = error_from_rpc(exc, address)
                raise type(error)(f"{error} ({done} of {len(nodes)} nodes are done)") from exc
        print(f"{address}: {changed.state}, weights {changed.weights}, epoch {changed.epoch}", flush=True)


def _reload(model_dir: str, when: str) -> Change:
    return lambda channel: pb_grpc.WeightChangesStub(channel).Reload(pb.ReloadRequest(model_dir=model_dir, when=when))


def _sleep(when: str) -> Change:
    return lambda channel: pb_grpc.WeightChangesStub(channel).Sleep(pb.SleepRequest(when=when))


def _wake(model_dir: str) -> Change:
    return lambda channel: pb_grpc.WeightChangesStub(channel).Wake(pb.WakeRequest(model_dir=model_dir))


def _patch(path: Path, when: str) -> Change:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; --file is a patch in safetensors format")

    def pieces() -> Iterator[pb.PatchPiece]:
        with path.open("rb") as file:
            while data := file.read(_PIECE):
                yield pb.PatchPiece(data=data, when=when)

    return lambda channel: pb_grpc.WeightChangesStub(channel).Patch(pieces())
