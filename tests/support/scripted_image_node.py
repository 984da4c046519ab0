"""A scripted node that takes the pixels of images, and images as a router has loaded them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from image_node import INPUT, Picture
from scripted_node import ScriptedNode

from pdserve.images import ImageInput, image_digest
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import image_input_to_pb
from router.images.loading import LoadedImage


def loaded(picture: Picture, accepted: ImageInput = INPUT) -> LoadedImage:
    return LoadedImage(picture.digest, picture.height, picture.width, accepted, memoryview(picture.pixels))


class ScriptedImageNode(ScriptedNode, pb_grpc.ImageNodeServicer):
    """``put`` has the digests of the images that came whole. ``before`` may refuse a call, or let it wait."""

    def __init__(self, model: str, node_id: str, role: str = "decode", images: ImageInput | None = INPUT) -> None:
        self.put: list[bytes] = []
        self.cancelled = 0  # calls
        self.most_at_once = 0  # calls with one digest
        self.most_open = 0  # calls
        self.before: Callable[[Any], Awaitable[None]] = _accept
        self._open = Counter[bytes]()
        super().__init__(model, node_id=node_id)
        self.description.role = role
        if images is not None:
            self.description.images.CopyFrom(image_input_to_pb(images))

    def add_services(self, server: grpc.aio.Server) -> None:
        super().add_services(server)
        pb_grpc.add_ImageNodeServicer_to_server(self, server)

    async def Put(self, request_iterator: AsyncIterator[pb.ImagePiece], context: Any) -> pb.ImageStored:
        header = (await anext(request_iterator)).header
        self._open[header.digest] += 1
        self.most_at_once = max(self.most_at_once, self._open[header.digest])
        self.most_open = max(self.most_open, self._open.total())
        try:
            pixels = b"".join([piece.data async for piece in request_iterator])
            await self.before(context)
            await asyncio.sleep(0.01)  # calls of other requests come meanwhile
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._open[header.digest] -= 1
        assert image_digest(header.fingerprint, header.height, header.width, pixels) == header.digest
        self.put.append(header.digest)
        return pb.ImageStored()


async def _accept(context: Any) -> None: ...
