"""Loads the images of a request: decoded and resized as the model takes them, in worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.images import ImageInput
from router.images.source import ImageSource


class LoadedImage:
    """An image as the model takes it. Its memory is freed with the last reference to it."""

    def __init__(self, digest: bytes, height: int, width: int, accepted: ImageInput, pixels: memoryview) -> None:
        self.digest = digest  # image_digest, 32 bytes
        self.height = height  # pixels, resized
        self.width = width
        self.rows = height // accepted.cell  # tokens
        self.columns = width // accepted.cell
        self.fingerprint = accepted.fingerprint
        self.pixels = pixels  # uint8 [height * width * 3], RGB


class ImageLoader:
    """One per router."""

    async def load(self, sources: Sequence[ImageSource], accepted: ImageInput) -> list[LoadedImage]:
        """Return the images in order. Raises RequestError, which names the image, or Overloaded."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the worker processes."""
