"""``pdserve weights``: show and change the weights of running nodes.

Nodes change their weights, sleep or wake one after the other, each once the one before is done.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import grpc

from pdserve.errors import ConfigError, NodeError
from pdserve.flags.declaration import add_flag
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.flags.shared import GRPC_TLS
from pdserve.host.process import run_command
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.address import split_address
from pdserve.rpc.channel import open_channel
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.tls import PeerTls
from pdserve.weights.change import WAIT, WHEN

_PIECE = 256 << 10  # bytes; every node takes a message of this size (pdserve/rpc/message_limits.py)
_DESCRIBE_SECONDS = 10.0
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # HTTP/2 preface of a client, with empty settings
_HTTP1 = b"HTTP/1."  # beginning of an HTTP/1 server's answer
_TLS_ALERT = b"\x15\x03"

Change = Callable[[grpc.aio.Channel], Awaitable[pb.WeightsChanged]]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: weights(make_parser().parse_args(argv)))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve weights", "Show and change the weights of running nodes.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_nodes(actions.add_parser("show", help="print state and weights of nodes"))
    reload = actions.add_parser("reload", help="load another checkpoint of the same model, one node after the other")
    add_nodes(reload)
    _add_model(reload, required=True)
    _add_when(reload)
    _add_pause(reload)
    patch = actions.add_parser("patch", help="change some values of the weights, one node after the other")
    add_nodes(patch)
    patch.add_argument("--file", required=True, metavar="FILE", help="patch in safetensors format (docs/weights.md)")
    _add_when(patch)
    _add_pause(patch)
    sleep = actions.add_parser(
        "sleep", help="end the engines of nodes: weights and KV are dropped, all memory is freed"
    )
    add_nodes(sleep)
    _add_when(sleep)
    wake = actions.add_parser("wake", help="start the engines of sleeping nodes again")
    add_nodes(wake)
    _add_model(wake, required=False)
    return parser


def _add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    text = "directory of the checkpoint on the nodes' hosts, below that of their --allow-weight-changes"
    if not required:
        text += " (default: the one that the node has loaded last)"
    parser.add_argument("--model", required=required, default="", metavar="DIR", help=text)


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the addresses of nodes, and how to call them."""
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="host:port of a node")
    add_flag(parser, "grpc_tls", GRPC_TLS)


def _add_pause(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pause",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between a node and the next one, in which routers and peers learn that it serves again "
        "(default %(default)s)",
    )


def _add_when(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--when",
        choices=WHEN,
        default=WAIT,
        help="wait: requests that run on the node end first, within its --drain-timeout; abort: they end now, and "
        "routers continue them on nodes with the same weights (default %(default)s)",
    )


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
            node = await describe(channel, address, tls)
        print(f"{address}  {node.role:<8} {node.state:<16} weights {node.weights or '-'}  epoch {node.epoch}")


async def describe(channel: grpc.aio.Channel, address: str, tls: PeerTls | None) -> pb.NodeDescription:
    """Ask a node to describe itself, once it accepts the connection. Raises NodeError."""
    await _check_speaks(address, plain=tls is None)
    stub = pb_grpc.NodeStub(channel)
    try:
        return await stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_SECONDS, wait_for_ready=True)
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"{address} does not answer within {_DESCRIBE_SECONDS:g} s; check that a node listens there"
            raise NodeError(text) from exc
        raise NodeError(str(error_from_rpc(exc, address))) from exc


async def _check_speaks(address: str, plain: bool) -> None:
    """Raise NodeError for a closed port, or one of no node: gRPC would wait for it as it waits for a busy node.

    ``plain``: the connection has no TLS.
    """
    answer = None
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            reader, writer = await asyncio.open_connection(*split_address(address))
            try:
                if plain:
                    writer.write(_HTTP2)
                    answer = await reader.read(len(_HTTP1))
            finally:
                writer.close()
    except ConnectionRefusedError as exc:
        raise NodeError(f"nothing listens on {address}; check the address, and that the node runs") from exc
    except OSError:  # gRPC, which may take other routes, says more; TimeoutError is one, too
        return
    if answer == _HTTP1:
        problem = f"{address} is no node: it speaks HTTP/1.1, as routers do"
        raise NodeError(f"{problem}; give the addresses of nodes, which the router's /dashboard lists")
    if answer is not None and answer[: len(_TLS_ALERT)] in (_TLS_ALERT, b""):  # gRPC ends connections without TLS
        raise NodeError(f"{address} speaks TLS only; give --grpc-tls DIR, or check that the address is a node's")


async def _change(nodes: list[str], tls: PeerTls | None, change: Change, pause: float = 0.0) -> None:
    for done, address in enumerate(nodes):
        await asyncio.sleep(pause if done else 0.0)
        async with open_channel(address, tls=tls) as channel:
            await describe(channel, address, tls)  # waits for the connection, which a busy node may not accept at once
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
