"""``pdserve lora``: list, load and unload the LoRA adapters of running nodes."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from cli.weights import add_nodes, describe
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.host.process import run_command
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.address import split_address
from pdserve.rpc.channel import open_channel
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.tls import PeerTls

if TYPE_CHECKING:
    from pdserve.pb.pdserve_pb2_grpc import AdapterChangesAsyncStub

_Order = Callable[["AdapterChangesAsyncStub"], Awaitable[pb.NamedAdapter]]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: lora(make_parser().parse_args(argv)))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve lora", "List, load and unload the LoRA adapters of running nodes.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_nodes(actions.add_parser("list", help="print the adapters of nodes"))
    load = actions.add_parser("load", help="load an adapter on nodes, which serve it from then on")
    add_nodes(load)
    _add_name(load)
    text = "directory of the adapter on the nodes' hosts, below that of their --allow-weight-changes"
    load.add_argument("--path", required=True, metavar="DIR", help=text)
    text = "the name may be in use: new requests get the new adapter, running ones keep the old one"
    load.add_argument("--in-place", action="store_true", help=text)
    unload = actions.add_parser("unload", help="take no new requests of an adapter; running ones go on")
    add_nodes(unload)
    _add_name(unload)
    return parser


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, metavar="NAME", help="name of the adapter in the API")


def lora(args: argparse.Namespace) -> int:
    """Run ``pdserve lora``. Raises the error of the first node that fails; later ones are not asked."""
    tls = None if args.grpc_tls is None else PeerTls(args.grpc_tls)
    for address in args.nodes:
        split_address(address)
    match args.action:
        case "list":
            asyncio.run(_list(args.nodes, tls))
        case "load":
            request = pb.LoadAdapterRequest(name=args.name, directory=args.path, replace=args.in_place)
            asyncio.run(_order(args.nodes, tls, lambda stub: stub.Load(request)))
        case "unload":
            asyncio.run(_order(args.nodes, tls, lambda stub: stub.Unload(pb.UnloadAdapterRequest(name=args.name))))
    return 0


async def _list(nodes: Sequence[str], tls: PeerTls | None) -> None:
    for address in nodes:
        async with open_channel(address, tls=tls) as channel:
            node = await describe(channel, address, tls)
        for adapter in node.adapters:
            if adapter.name:
                print(_line(address, adapter))


async def _order(nodes: Sequence[str], tls: PeerTls | None, order: _Order) -> None:
    for done, address in enumerate(nodes):
        async with open_channel(address, tls=tls) as channel:
            await describe(channel, address, tls)  # waits for the connection
            stub: AdapterChangesAsyncStub = pb_grpc.AdapterChangesStub(channel)
            try:
                adapter = await order(stub)
            except grpc.aio.AioRpcError as exc:
                error = error_from_rpc(exc, address)
                raise type(error)(f"{error} ({done} of {len(nodes)} nodes are done)") from exc
        print(_line(address, adapter), flush=True)


def _line(address: str, adapter: pb.NamedAdapter) -> str:
    return f"{address}  {adapter.name}  {adapter.digest[:12]}  rank {adapter.rank}  {adapter.root}"
