"""Sends the images of a prompt to the node that computes it (ImageNode.Put), while the prompt is on its way there.

    router ──Put(pixels)─────────────────────► P      each image once, three at a time; equal ones one after the other
           ──Generate──► D ──PrefillRequest──► P      the prompt waits there for its pixels, 10 s at most

The node keeps pixels until the prompts that need them are computed, so each prompt sends its own: those that another
one has sent may be gone when this one arrives. It drops them after 30 s without a prompt, so they are sent again while
the prompt may still wait on D.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.errors import ImagesMissing, NodeError, Overloaded, PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb.pdserve_pb2_grpc import ImageNodeStub
from pdserve.rpc.errors import error_from_rpc, rpc_reason
from router.fleet.node_client import NodeClient
from router.images.loading import LoadedImage

if TYPE_CHECKING:  # exists in the stubs' types only
    from pdserve.pb.pdserve_pb2_grpc import ImageNodeAsyncStub

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10  # the node's limit
_PUT_SECONDS = 30.0  # for an image; the node's limit
_PATIENCE = 8.0  # seconds to try a node without memory, less than prompts wait there
_REFRESH = 20.0  # seconds until the images of a prompt that is not computed are sent again
_FIRST_PAUSE = 0.05  # seconds; each pause is twice as long as the one before
_LONGEST_PAUSE = 0.5


class ImageUpload:
    """Brings images to one node until ``cancel``, or the first error.

    ``failed`` gets RequestError if the node never takes them, Overloaded if it lacks memory, else ImagesMissing.
    """

    def __init__(self, images: Iterable[LoadedImage], node: NodeClient, failed: Callable[[PdserveError], None]) -> None:
        self._failed = failed
        assert node.description is not None, "it was chosen by its view"
        self._node_id = node.description.node_id
        self._channel = node.channel
        self._slots = node.image_slots
        distinct = {image.digest: image for image in images}
        self._task = asyncio.create_task(self._run(tuple(distinct.values())), name="images")

    def cancel(self) -> None:
        """Stop. Idempotent."""
        self._task.cancel()

    async def _run(self, images: tuple[LoadedImage, ...]) -> None:
        """Ends well when cancelled: the traceback of an error would keep the images until garbage is collected."""
        with suppress(asyncio.CancelledError):
            try:
                await self._put_all(images)
            except PdserveError as exc:
                self._failed(exc)
            except Exception:  # a bug; without pixels the prompt would wait in vain
                logger.exception("images could not be sent to node %s", self._node_id)
                self._failed(NodeError("the router could not send an image to its node; its log says why"))
            else:
                await self._refresh(images)

    async def _refresh(self, images: tuple[LoadedImage, ...]) -> None:
        """Send the images again from time to time. Errors do not matter: the prompt may have arrived."""
        while True:
            await asyncio.sleep(_REFRESH)
            with suppress(PdserveError):
                await self._put_all(images)

    async def _put_all(self, images: tuple[LoadedImage, ...]) -> None:
        give_up_at = monotonic() + _PATIENCE
        for image in images:
            async with image.turn(self._node_id):
                await self._put_patiently(image, give_up_at)

    async def _put_patiently(self, image: LoadedImage, give_up_at: float) -> None:
        """Send an image, again and again while the node lacks memory: prompts that are computed free it."""
        pause = _FIRST_PAUSE
        while True:
            try:
                async with self._slots:
                    await self._put(image)
            except Overloaded:
                if monotonic() + pause > give_up_at:
                    raise
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _put(self, image: LoadedImage) -> None:
        stub: ImageNodeAsyncStub = ImageNodeStub(self._channel)
        call = stub.Put(_pieces(image), timeout=_PUT_SECONDS)
        try:
            await call
        except grpc.aio.AioRpcError as exc:
            error = error_from_rpc(exc, f"node {self._node_id}")
            if isinstance(error, RequestError | Overloaded):
                raise error from exc
            raise ImagesMissing(f"node {self._node_id} did not get an image: {rpc_reason(exc)}") from exc
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ImagesMissing(f"node {self._node_id} did not get an image: its connection was closed") from None
        finally:
            call.cancel()


async def _pieces(image: LoadedImage) -> AsyncIterator[pb.ImagePiece]:
    header = pb.ImageHeader(digest=image.digest, fingerprint=image.fingerprint, height=image.height, width=image.width)
    yield pb.ImagePiece(header=header)
    for start in range(0, len(image.pixels), PIECE_BYTES):
        yield pb.ImagePiece(data=bytes(image.pixels[start : start + PIECE_BYTES]))
