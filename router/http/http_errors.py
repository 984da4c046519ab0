"""Errors as clients see them: a status, and OpenAI's error object."""

from __future__ import annotations

import math

import msgspec
from starlette.types import Send

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


class NotStored(RequestError):
    """The request is about something that an earlier one made; nothing is kept."""


class Unauthorized(PdserveError):
    """The request has no API key, or an unknown one."""

    code = "invalid_api_key"


class LimitExceeded(PdserveError):
    """A client has used up a limit of its own. ``retry_after`` is in seconds, ``headers`` say what is left."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: float, headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = headers


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class HttpError(msgspec.Struct, frozen=True):
    """A response that says what went wrong."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]


# First match counts.
_KINDS: tuple[tuple[type[PdserveError], int, str], ...] = (
    (Unauthorized, 401, "invalid_request_error"),
    (LimitExceeded, 429, "rate_limit_error"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (ModelNotFound, 404, "invalid_request_error"),
    (NotStored, 404, "invalid_request_error"),
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
    body = _object_of(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    match error:
        case Unauthorized():
            headers.append((b"www-authenticate", b"Bearer"))
        case LimitExceeded():
            headers += [_retry_after(error.retry_after), *error.headers]
        case Overloaded():
            headers.append(_retry_after(error.retry_after))
    return HttpError(status, body, headers)


def _retry_after(seconds: float) -> tuple[bytes, bytes]:
    """HTTP knows whole seconds only; 0 would mean that it can be tried at once."""
    return b"retry-after", b"%d" % max(1, math.ceil(seconds))


async def send_error(send: Send, error: PdserveError) -> None:
    await send_answer(send, http_error(error))


async def send_answer(send: Send, answer: HttpError) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


def error_event(error: PdserveError) -> bytes:
    """An error after the stream has begun, as a server-sent event; no [DONE] follows it."""
    return b"data: " + _object_of(error) + b"\n\n"


def _object_of(error: PdserveError) -> bytes:
    _, name = kind_of(error)
    code = getattr(error, "code", None) or {"overloaded_error": "overloaded", "timeout_error": "timeout"}.get(name)
    return error_object(str(error), name, getattr(error, "param", None), code)
