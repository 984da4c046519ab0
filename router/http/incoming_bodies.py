"""Bodies of requests before any of their bytes is read: compressed ones, and those that announce too many bytes."""

from __future__ import annotations

import asyncio
import zlib

from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from pdserve.errors import RequestError, cut
from router.errors import BodyTooLarge, ErrorFormat
from router.http.error_responses import error_response, http_error
from router.http.request_ids import request_id_of

_PIECE_BYTES = 256 * 1024  # decompressed at a time, 1 ms of the event loop
_GZIP = 16 + zlib.MAX_WBITS


def refused_body(scope: Scope, max_bytes: int, errors: ErrorFormat) -> Response | None:
    """Return the response to a body that is not read: 415, or 413 for a client that waits for ``100 Continue``.

    Other clients send the body anyway, and might not find a response before its end.
    """
    headers = dict(scope["headers"])
    coding = _coding(scope)
    if coding not in ("", "gzip"):
        text = f"content-encoding {cut(coding)} is not supported; send gzip, or no encoding"
        response = http_error(415, text, errors)
        response.headers["accept-encoding"] = "gzip"
    elif b"expect" in headers and int(headers.get(b"content-length", b"0")) > max_bytes:
        error = BodyTooLarge(f"the body exceeds {max_bytes} bytes; send less", code="body_too_large")
        response = error_response(error, errors, request_id_of(scope))
    else:
        return None
    response.headers["connection"] = "close"
    return response


def receive_decoded(scope: Scope, receive: Receive) -> Receive:
    """Return ``receive``, or one that decompresses the body in pieces, so that limits hold for decompressed bytes."""
    return _GzipBody(receive).receive if _coding(scope) == "gzip" else receive


def _coding(scope: Scope) -> str:
    values = [value for name, value in scope["headers"] if name == b"content-encoding"]
    coding = b",".join(values).decode("latin-1").strip().lower()
    return {"identity": "", "x-gzip": "gzip"}.get(coding, coding)


class _GzipBody:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._decompressor = zlib.decompressobj(_GZIP)
        self._rest = b""  # compressed bytes that are left
        self._arrived = False  # the whole body has arrived

    async def receive(self) -> Message:
        """Return the next message. Raises RequestError if the body is not one gzip member."""
        if self._decompressor.eof and self._arrived:
            return await self._receive()
        if not self._rest and not self._arrived:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._rest = message.get("body", b"")
            self._arrived = not message.get("more_body", False)
        try:
            piece = self._decompressor.decompress(self._rest, _PIECE_BYTES)
        except zlib.error as exc:
            raise RequestError(f"the body is not valid gzip: {exc}") from exc
        self._rest = self._decompressor.unconsumed_tail
        if self._decompressor.unused_data:
            raise RequestError("bytes follow the end of the gzip body; send one gzip member")
        ended = self._arrived and not self._rest
        if ended and not self._decompressor.eof and len(piece) < _PIECE_BYTES:
            raise RequestError("the gzip body is cut off; send all of it")
        await asyncio.sleep(0)  # other tasks run in between
        return {"type": "http.request", "body": piece, "more_body": not (self._arrived and self._decompressor.eof)}
