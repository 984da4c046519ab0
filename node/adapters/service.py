"""The service that takes orders for adapters from callers that ``--allow-weight-changes`` admits."""

from __future__ import annotations

from typing import Any

import grpc
from msgspec.structs import asdict

from node.adapters.node_adapters import NodeAdapters
from node.context import NodeContext
from node.weights.allowed_directory import AllowedDirectory
from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import abort

ADAPTERS_SERVICE = "pdserve.v1.AdapterChanges"

Context = grpc.aio.ServicerContext[Any, Any]


class AdapterChangesService(pb_grpc.AdapterChangesServicer):
    def __init__(self, node: NodeContext, adapters: NodeAdapters, root: str) -> None:
        """``root`` is the directory of ``--allow-weight-changes``; empty: all orders are refused."""
        self._node = node
        self._adapters = adapters
        self._allowed = AllowedDirectory(node.name, root)

    async def Load(self, request: pb.LoadAdapterRequest, context: Context) -> pb.NamedAdapter:
        try:
            directory = self._allowed.find(request.directory)
            self._node.check_ready()
            named = await self._adapters.load(request.name, directory, replace=request.replace)
        except PdserveError as exc:
            await abort(context, exc)
        return pb.NamedAdapter(**asdict(named))

    async def Unload(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.NamedAdapter:
        try:
            self._allowed.check()
            named = await self._adapters.unload(request.name)
        except PdserveError as exc:
            await abort(context, exc)
        return pb.NamedAdapter(**asdict(named))
