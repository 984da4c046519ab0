"""Orders of an administrator to all nodes of a model: load an adapter, or unload it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from pdserve.errors import NodeError, PdserveError, RequestError, shown
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import error_from_rpc
from router.fleet.node_client import NodeClient

if TYPE_CHECKING:
    from pdserve.pb.pdserve_pb2_grpc import AdapterChangesAsyncStub

_SECONDS = 300.0  # for all ranks of a node to read an adapter from a slow disk

_Call = Callable[["AdapterChangesAsyncStub"], Awaitable[pb.NamedAdapter]]


async def load_on_all(nodes: Sequence[NodeClient], name: str, directory: str, replace: bool) -> None:
    """Load an adapter on all nodes at the same time. Raises RequestError or NodeError, which names the first failure.

    Nodes that have loaded a new name then unload it. After a failed reload, some nodes have the new adapter.
    """
    request = pb.LoadAdapterRequest(name=name, directory=directory, replace=replace)
    errors = await _call_all(nodes, lambda stub: stub.Load(request, timeout=_SECONDS))
    failed = next((error for error in errors if error is not None), None)
    if failed is None:
        return
    loaded = [node for node, error in zip(nodes, errors, strict=True) if error is None]
    if replace and loaded:
        raise NodeError(f"{len(loaded)} of {len(nodes)} nodes have reloaded {shown(name)}: {failed}; reload it again")
    await _call_all(loaded, _unloading(name))
    raise failed


async def unload_on_all(nodes: Sequence[NodeClient], name: str) -> None:
    """Unload an adapter on all nodes that have it. Raises RequestError or NodeError after the last answer."""
    having = [
        node
        for node in nodes
        if node.description is not None and any(adapter.name == name for adapter in node.description.adapters)
    ]
    errors = await _call_all(having, _unloading(name))
    for error in errors:
        if error is not None:
            raise error


def _unloading(name: str) -> _Call:
    return lambda stub: stub.Unload(pb.UnloadAdapterRequest(name=name), timeout=_SECONDS)


async def _call_all(nodes: Sequence[NodeClient], call: _Call) -> list[PdserveError | None]:
    return await asyncio.gather(*(_error_of(node, call) for node in nodes))


async def _error_of(node: NodeClient, call: _Call) -> PdserveError | None:
    """Call one node; return its error. A refused order is the client's error, for which no node is at fault."""
    stub: AdapterChangesAsyncStub = pb_grpc.AdapterChangesStub(node.channel)
    try:
        await call(stub)
    except grpc.aio.AioRpcError as exc:
        error = error_from_rpc(exc, node.address)
        refused = exc.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)
        return RequestError(str(error), "lora_path") if refused else error
    return None
