"""The ImageNode service: routers bring the pixels of prompts to the node that computes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from node.context import NodeContext
from node.health import NodeState
from node.images.incoming import IncomingImage, check_header
from node.images.uploads import StoredUploads
from pdserve.errors import DeadlineExceeded, PdserveError, RequestError
from pdserve.images import PIXEL_BYTES, ImageMode
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import abort
from pdserve.rpc.field_ranges import check_message

_PUT_SECONDS = 30.0  # from the call to the engine

Context = grpc.aio.ServicerContext[Any, Any]


def attach_images(node: NodeContext, server: grpc.aio.Server, memory: int) -> None:
    """Let a node take pixels of up to ``memory`` bytes at a time, if it encodes images."""
    accepted = node.config.image_input
    if node.config.images is ImageMode.TOWER and accepted is not None:
        uploads = StoredUploads(node.engine.send, node.engine.room, accepted, memory)
        node.images = uploads
        pb_grpc.add_ImageNodeServicer_to_server(ImageService(node, uploads), server)


class ImageService(pb_grpc.ImageNodeServicer):
    def __init__(self, node: NodeContext, uploads: StoredUploads) -> None:
        self._node = node
        self._uploads = uploads

    async def Put(self, request_iterator: AsyncIterator[pb.ImagePiece], context: Context) -> pb.ImageStored:
        try:
            async with asyncio.timeout(_PUT_SECONDS):
                outcome = await self._receive(request_iterator)
                await self._skip(request_iterator)
        except TimeoutError:
            await self._refuse(DeadlineExceeded(f"the pixels did not arrive within {_PUT_SECONDS:g} s"), context)
        except PdserveError as exc:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PUT_SECONDS):
                    await self._skip(request_iterator)
            await self._refuse(exc, context)
        self._uploads.outcomes[outcome] += 1
        return pb.ImageStored()

    async def _refuse(self, error: PdserveError, context: Context) -> NoReturn:
        self._uploads.outcomes["refused"] += 1
        if isinstance(error, RequestError):
            self._node.violations.add(context.peer(), error)
        await abort(context, error)

    async def _skip(self, pieces: AsyncIterator[pb.ImagePiece]) -> None:
        """Read the rest of a stream, as long as it may be that of an image.

        gRPC may report a failed write in place of the status of a call that ends before its client has sent all.
        """
        left = self._uploads.accepted.max_pixels * PIXEL_BYTES
        async for piece in pieces:
            left -= max(1, len(piece.data))
            if left < 0:
                return

    async def _receive(self, pieces: AsyncIterator[pb.ImagePiece]) -> str:
        """Take an image from a router. Return whether it was "stored", or "known" before all of it was read."""
        image: IncomingImage | None = None
        try:
            async for piece in pieces:
                check_message(piece)
                if piece.HasField("header") != (image is None):
                    raise RequestError("the header of an image must come in the first message, and only there")
                if image is None:
                    digest = piece.header.digest
                    self._check_state(digest)
                    check_header(piece.header, self._uploads.accepted)
                if self._uploads.knows(digest):
                    return "known"
                if image is None:
                    image = IncomingImage(piece.header, self._uploads.memory)
                image.add(piece.data)
            if image is None:
                raise RequestError("the stream ended without a header")
            await image.check()
            self._check_state(image.digest)
            await self._uploads.store(image)
            return "stored"
        finally:
            if image is not None:
                image.close()

    def _check_state(self, digest: bytes) -> None:
        """Raise NodeError or Draining, unless prompts are accepted, or one that was accepted waits for this image."""
        if self._node.state is not NodeState.DRAINING or not self._uploads.awaited(digest):
            self._node.check_ready()
