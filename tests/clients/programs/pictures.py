"""Image files for the programs of this folder, whose environments have no library that writes any."""

from __future__ import annotations

import base64
import random
import struct
import zlib

CELL = 32  # pixels on a side of a token, in the model of ``tests/support/image_checkpoints.py``


def png(rows: int, columns: int, seed: int) -> str:
    """Return base64 of a PNG file of so many tokens, with random pixels."""
    height = rows * CELL
    width = columns * CELL
    pixels = random.Random(seed).randbytes(3 * height * width)
    lines = b"".join(b"\0" + pixels[start : start + 3 * width] for start in range(0, len(pixels), 3 * width))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of each of red, green and blue
    parts = [_part(b"IHDR", header), _part(b"IDAT", zlib.compress(lines, 1)), _part(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def data_url(rows: int, columns: int, seed: int) -> str:
    return f"data:image/png;base64,{png(rows, columns, seed)}"


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
