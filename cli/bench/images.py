"""Random images of ``pdserve bench``: PNG files of coloured squares, written without a library.

Each row of squares is one random line of pixels, and lines equal to it. So a file is a fraction of its pixels, as the
file of a screenshot is, and decoding it takes a server the same work.
"""

from __future__ import annotations

import argparse
import base64
import random
import struct
import zlib
from typing import NamedTuple

from pdserve.errors import shown
from pdserve.images import MAX_IMAGES

_MAX_SIDE = 16_384  # pixels
_SQUARE = 8  # pixels on a side
_UP = b"\2"  # filter: the line holds differences to that above

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 2  # type of colour; 8 bits each


class ImageSize(NamedTuple):
    """``--image WxH`` or ``WxHxN``: so many images of this size in each request."""

    width: int  # pixels
    height: int
    number: int = 1

    def __str__(self) -> str:
        size = f"{self.width} × {self.height}"
        return size if self.number == 1 else f"{self.number} × {size}"


def parse_image_size(text: str) -> ImageSize:
    """Parse "1920x1080", or "1920x1080x4" for four images."""
    try:
        size = ImageSize(*map(int, text.lower().split("x")))
    except (TypeError, ValueError):
        size = ImageSize(0, 0)
    if not (1 <= size.width <= _MAX_SIDE and 1 <= size.height <= _MAX_SIDE and 1 <= size.number <= MAX_IMAGES):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is invalid; use a size in pixels such as 1920x1080, or 1920x1080x4 for four images: sides "
            f"up to {_MAX_SIDE:,}, {MAX_IMAGES} images"
        )
    return size


def random_image_url(rng: random.Random, size: ImageSize) -> str:
    """Return a data: URL of a random PNG file."""
    file = _png(rng, size.width, size.height)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def _png(rng: random.Random, width: int, height: int) -> bytes:
    same = _UP + bytes(3 * width)
    lines = []
    for top in range(0, height, _SQUARE):
        colours = rng.randbytes(3 * -(-width // _SQUARE))
        line = b"".join(colours[at : at + 3] * _SQUARE for at in range(0, len(colours), 3))
        lines.append(b"\0" + line[: 3 * width])
        lines += [same] * (min(_SQUARE, height - top) - 1)
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines), 1)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
