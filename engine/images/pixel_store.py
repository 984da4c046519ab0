"""Pixels of images in the engine, from the frontend: PutPixels brings them part by part, DropPixels ends them.

The frontend bounds their memory (``--image-memory``). It sends complete pixels before the Submit that needs them.
"""

from __future__ import annotations

from pdserve.ipc.messages import PutPixels


class PixelStore:
    """Complete pixels, by digest. Parts of an image that is incomplete are nowhere visible."""

    def __init__(self) -> None:
        self._parts: dict[bytes, list[bytes]] = {}
        self._complete: dict[bytes, bytes] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._complete

    def __len__(self) -> int:
        """Images that are complete, or have begun to arrive."""
        return len(self._complete) + len(self._parts.keys() - self._complete.keys())

    def get(self, digest: bytes) -> bytes:
        """Return uint8 [height, width, 3] of an image that is here."""
        return self._complete[digest]

    def put(self, part: PutPixels) -> None:
        """Add the next part of an image. Parts after the last one begin the image again."""
        self._parts.setdefault(part.digest, []).append(part.data)
        if part.last:
            self._complete[part.digest] = b"".join(self._parts.pop(part.digest))

    def drop(self, digest: bytes) -> None:
        """Free the pixels of an image. Unknown digests are ignored."""
        self._parts.pop(digest, None)
        self._complete.pop(digest, None)
