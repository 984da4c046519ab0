"""Files that are no images, or images that would cost much, with words of the errors that they get."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from image_checkpoints import random_image
from PIL import Image, PngImagePlugin

from router.images.decoding import MAX_FILE_PIXELS


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, color: int = 2) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))


def png_bomb(width: int, height: int, alpha: bool = False) -> bytes:
    """Return an image of black or transparent pixels; each row has a filter byte."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (4 if alpha else 3) * width)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png_header(width, height, 6 if alpha else 2) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "x" * (64 << 20), zip=True)
    return encoded(random_image(40, 40, 1), pnginfo=info)


def frames(kind: str) -> bytes:
    still = [random_image(40, 40, number) for number in range(3)]
    return encoded(still[0], kind, save_all=True, append_images=still[1:], duration=50)


def gif_of(width: int, height: int, frame: tuple[int, int]) -> bytes:
    """Return a GIF with one frame of any size; its pixels are missing."""
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x08\x02L\x01\x00;"


PHOTO = encoded(random_image(200, 200, 1), "JPEG")
ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "no complete PNG, JPEG, WebP or GIF"),
    "HTML": (lambda: b"<!doctype html><html><body>404</body></html>", "no complete PNG, JPEG, WebP or GIF"),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no complete PNG, JPEG, WebP or GIF"),
    "BMP": (lambda: encoded(random_image(40, 40, 1), "BMP"), "no complete PNG, JPEG, WebP or GIF"),
    "TIFF": (lambda: encoded(random_image(40, 40, 1), "TIFF"), "no complete PNG, JPEG, WebP or GIF"),
    "EPS": (lambda: encoded(random_image(40, 40, 1), "EPS"), "no complete PNG, JPEG, WebP or GIF"),
    "PDF": (lambda: encoded(random_image(40, 40, 1), "PDF"), "no complete PNG, JPEG, WebP or GIF"),
    "noise": (lambda: np.random.default_rng(1).bytes(100_000), "no complete PNG, JPEG, WebP or GIF"),
    "only the header of a PNG": (lambda: png_header(64, 64), "no complete PNG"),
    "truncated PNG": (lambda: encoded(random_image(200, 200, 1))[:-200], "cannot be decoded"),
    "truncated JPEG": (lambda: PHOTO[: len(PHOTO) // 2], "cannot be decoded"),
    "truncated WebP": (lambda: encoded(random_image(200, 200, 1), "WEBP")[:-200], "cannot be decoded"),
    "changed PNG": (lambda: encoded(random_image(200, 200, 1)).replace(b"IDAT", b"IDAU"), "no complete PNG"),
    "a bomb's header": (lambda: png_header(60_000, 60_000) + chunk(b"IDAT", b""), f"the limit is {MAX_FILE_PIXELS}"),
    "pixel bomb": (lambda: png_bomb(20_000, 8_000), "has 20000 × 8000 pixels, the limit is"),
    "GIF bomb": (lambda: gif_of(65_535, 65_535, (1, 1)), "has 65535 × 65535 pixels, the limit is"),
    "GIF whose frame is larger": (lambda: gif_of(1, 1, (65_535, 65_535)), "has 65535 × 65535 pixels, the limit is"),
    "endless side": (lambda: png_header(2**31 - 1, 1) + chunk(b"IDAT", b""), "the limit is"),
    "long strip": (lambda: png_bomb(2_001, 10), "one side may be at most 200 times as long"),
    "text bomb": (text_bomb, "cannot be decoded"),
    "profile bomb": (
        lambda: png_header(8, 8) + chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(64 << 20))) + chunk(b"IDAT", b""),
        "cannot be decoded",
    ),
    "animated GIF": (lambda: frames("GIF"), "is animated"),
    "animated PNG": (lambda: frames("PNG"), "is animated"),
    "animated WebP": (lambda: frames("WEBP"), "is animated"),
}
