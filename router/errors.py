"""Errors as clients see them: a status, and OpenAI's error object."""

from __future__ import annotations

import math

import msgspec

from pdserve.errors import (
    DeadlineExceeded,
    ModelNotFound,
    NodeError,
    Overloaded,
    PdserveError,
    RequestError,
)


class BodyTooLarge(RequestError):
    """The body of a request exceeds the size limit."""


class HttpError(msgspec.Struct, frozen=True):
    """A response that says what went wrong. ``retry_after`` is in seconds, 0 for none."""

    status: int
    body: bytes
    retry_after: int = 0

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        if self.retry_after:
            headers.append((b"retry-after", b"%d" % self.retry_after))
        return headers


# First match counts.
_KINDS: tuple[tuple[type[PdserveError], int, str], ...] = (
    (BodyTooLarge, 413, "invalid_request_error"),
    (ModelNotFound, 404, "invalid_request_error"),
    (RequestError, 400, "invalid_request_error"),
    (Overloaded, 503, "overloaded_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (NodeError, 502, "node_error"),
)


def kind_of(error: PdserveError) -> tuple[int, str]:
    """HTTP status and OpenAI type of an error."""
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return status, name
    return 500, "server_error"


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def http_error(error: PdserveError) -> HttpError:
    status, _ = kind_of(error)
    retry_after = math.ceil(error.retry_after) if isinstance(error, Overloaded) else 0
    return HttpError(status, _object_of(error), retry_after)


def error_event(error: PdserveError) -> bytes:
    """An error after the stream has begun, as a server-sent event; no [DONE] follows it."""
    return b"data: " + _object_of(error) + b"\n\n"


def _object_of(error: PdserveError) -> bytes:
    _, name = kind_of(error)
    code = getattr(error, "code", None) or {"overloaded_error": "overloaded", "timeout_error": "timeout"}.get(name)
    return error_object(str(error), name, getattr(error, "param", None), code)
