"""Errors as HTTP responses: status, headers and OpenAI's error object."""

from __future__ import annotations

import math

import msgspec
from starlette.types import Send

from pdserve.errors import Overloaded, PdserveError
from router.errors import ErrorInfo, RateLimitExceeded, Unauthorized, encode_error, error_body, status_and_type


class HttpError(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]


SERVER_ERROR = HttpError(
    500,
    encode_error(ErrorInfo("the router failed to handle this request; see its log", "server_error", None, None)),
    [(b"content-type", b"application/json")],
)


def http_error(error: PdserveError) -> HttpError:
    status, _ = status_and_type(error)
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    match error:
        case Unauthorized():
            headers.append((b"www-authenticate", b"Bearer"))
        case RateLimitExceeded():
            headers += [_retry_after(error.retry_after), *error.headers]
        case Overloaded():
            headers.append(_retry_after(error.retry_after))
    return HttpError(status, body, headers)


def _retry_after(seconds: float) -> tuple[bytes, bytes]:
    """Round up to whole seconds, at least 1: 0 would mean "retry at once"."""
    return b"retry-after", b"%d" % max(1, math.ceil(seconds))


async def send_error(send: Send, error: HttpError) -> None:
    await send({"type": "http.response.start", "status": error.status, "headers": error.headers})
    await send({"type": "http.response.body", "body": error.body})
