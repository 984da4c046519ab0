"""An image while its pixels arrive: what a router sends is compared with its header, and with what the model takes."""

from __future__ import annotations

import asyncio

from node.images.pixel_memory import PixelMemory
from pdserve.errors import RequestError
from pdserve.images import DIGEST_BYTES, PIXEL_BYTES, ImageInput, image_digest
from pdserve.ipc.messages import MAX_PIXEL_PART
from pdserve.pb import pdserve_pb2 as pb


class IncomingImage:
    """Its bytes count against the node's memory until ``close``, or until an upload takes its ``room`` over."""

    def __init__(self, header: pb.ImageHeader, memory: PixelMemory) -> None:
        """``check_header`` has accepted the header. Raises Overloaded without memory for the pixels."""
        self.digest = header.digest
        self.size = (header.height, header.width)
        self.num_bytes = header.height * header.width * PIXEL_BYTES
        self.pixels = bytearray()
        self.room = memory.reserve(self.num_bytes)
        self._fingerprint = header.fingerprint

    def add(self, data: bytes) -> None:
        """Add the next pixels. Raises RequestError if they are too many."""
        if len(data) > MAX_PIXEL_PART:
            raise RequestError(f"data has {len(data)} bytes, the limit is {MAX_PIXEL_PART}; send smaller pieces")
        if len(self.pixels) + len(data) > self.num_bytes:
            raise RequestError(
                f"{len(self.pixels) + len(data)} bytes of pixels have arrived; {self._describe()} has {self.num_bytes}"
            )
        self.pixels += data

    async def check(self) -> None:
        """Raise RequestError unless the pixels are complete, and those of the digest. Hashes on a thread."""
        if len(self.pixels) < self.num_bytes:
            raise RequestError(
                f"the stream ended after {len(self.pixels)} bytes of pixels; {self._describe()} has {self.num_bytes}"
            )
        digest = await asyncio.to_thread(image_digest, self._fingerprint, *self.size, memoryview(self.pixels))
        if digest != self.digest:
            raise RequestError(
                f"the pixels have the digest {digest.hex()}, the header says {self.digest.hex()}; run the same release "
                "of pdserve everywhere"
            )

    def close(self) -> None:
        """Free its memory, unless an upload has it. Idempotent."""
        self.room.free()

    def _describe(self) -> str:
        height, width = self.size
        return f"an image of height {height} and width {width}"


def check_header(header: pb.ImageHeader, accepted: ImageInput) -> None:
    """Raise RequestError unless the header is one of an image that the model takes."""
    if len(header.digest) != DIGEST_BYTES:
        raise RequestError(f"digest has {len(header.digest)} bytes, not {DIGEST_BYTES}")
    if header.fingerprint != accepted.fingerprint:
        raise RequestError(
            f"fingerprint {header.fingerprint[:DIGEST_BYTES].hex() or '(none)'} is not that of this node's image "
            f"processor, {accepted.fingerprint.hex()}; serve the same checkpoint on all nodes"
        )
    for name, pixels in (("height", header.height), ("width", header.width)):
        if not pixels or pixels % accepted.cell or pixels > accepted.largest_side:
            raise RequestError(
                f"{name} {pixels} is not a multiple of {accepted.cell} pixels, up to {accepted.largest_side}"
            )
    if header.height * header.width > accepted.max_pixels:
        raise RequestError(
            f"height {header.height} × width {header.width} make {header.height * header.width} pixels; this model "
            f"takes {accepted.max_pixels} at most"
        )
