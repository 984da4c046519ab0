"""Messages on a stream socket. A frame is 4 bytes of length (little-endian) and that many bytes of msgpack."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

FRAME_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    body = _encoder.encode(message)
    return FRAME_HEADER.pack(len(body)) + body


class Frames(Generic[T]):
    """Splits received bytes into messages. Not thread-safe."""

    def __init__(self, kind: Any, longest: int = 2**32 - 1) -> None:
        """``kind`` is T: a type of messages or a union of types."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._longest = longest  # bytes of a message
        self._buffer = bytearray()

    def cut(self, data: bytes) -> list[T]:
        """Return the messages completed by ``data``. Raises msgspec.DecodeError for an invalid or too long message."""
        self._buffer += data
        messages: list[T] = []
        start = 0
        header = FRAME_HEADER.size
        with memoryview(self._buffer) as view:
            while len(view) - start >= header:
                (length,) = FRAME_HEADER.unpack_from(view, start)
                if length > self._longest:
                    raise msgspec.DecodeError(f"a message of {length} bytes; at most {self._longest} are accepted")
                end = start + header + length
                if end > len(view):
                    break
                messages.append(self._decoder.decode(view[start + header : end]))
                start = end
        del self._buffer[:start]
        return messages
