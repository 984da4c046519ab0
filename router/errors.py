"""Errors that only the router raises, and the HTTP status, type and JSON body of every error.

PdserveError
├── Unauthorized               401  no API key, or an unknown one
├── RateLimitExceeded          429  a limit of this client
├── StoreFailed                500  the response store cannot be read
├── CrashingRequest            500  two engines have ended with this request; clients must not repeat it
├── NodeError                  502
│   └── MalformedOutput             nodes have sent outputs that cannot be this request's
└── RequestError               400
    ├── BodyTooLarge           413
    ├── ResponseNotStored      404
    └── EndpointDisabled       404
ClientDisconnected (no PdserveError: there is no response)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from pdserve.errors import DeadlineExceeded, ModelNotFound, NodeError, Overloaded, PdserveError, RequestError, cut

MAX_MESSAGE = 1000  # characters; messages quote clients and templates


class Unauthorized(PdserveError):
    """The request has no API key, or an unknown one."""

    code = "invalid_api_key"


class RateLimitExceeded(PdserveError):
    """A client exceeds one of its own limits. ``retry_after`` is in seconds, ``headers`` are added to the response."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: float, headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = headers


class BodyTooLarge(RequestError):
    """The request body exceeds --max-body-bytes."""


class ResponseNotStored(RequestError):
    """The request names a response that is not stored for its client."""


class StoreFailed(PdserveError):
    """The response store cannot be read."""


class CrashingRequest(PdserveError):
    """The engines of two nodes have ended in steps with this request. Clients and proxies should not repeat it."""

    code = "request_crashes_engines"


class MalformedOutput(NodeError):
    """A decode node has sent an output that cannot be the request's. ``field`` is the field of the message."""

    def __init__(self, field: str, output: str) -> None:
        super().__init__(f"the decode node sent {output}; upgrade it, or restart it")
        self.field = field


class EndpointDisabled(RequestError):
    """A flag of the router, or the client's key, enables the endpoint."""


class ClientDisconnected(Exception):
    """The client closed its connection."""


# The first match counts.
_STATUSES: tuple[tuple[type[PdserveError], int, str], ...] = (
    (Unauthorized, 401, "invalid_request_error"),
    (RateLimitExceeded, 429, "rate_limit_error"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (ModelNotFound, 404, "invalid_request_error"),
    (ResponseNotStored, 404, "invalid_request_error"),
    (EndpointDisabled, 404, "invalid_request_error"),
    (RequestError, 400, "invalid_request_error"),
    (Overloaded, 503, "overloaded_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (NodeError, 502, "node_error"),
)
_DEFAULT_CODES = {"overloaded_error": "overloaded", "timeout_error": "timeout"}


class ErrorInfo(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    error: ErrorInfo


def status_and_type(error: PdserveError) -> tuple[int, str]:
    answers = ((status, name) for kind, status, name in _STATUSES if isinstance(error, kind))
    return next(answers, (500, "server_error"))


def error_info(error: PdserveError) -> ErrorInfo:
    _, kind = status_and_type(error)
    code = getattr(error, "code", None) or _DEFAULT_CODES.get(kind)
    param = getattr(error, "param", None)
    return ErrorInfo(
        message=cut(str(error), MAX_MESSAGE),
        type=kind,
        param=None if param is None else cut(param),
        code=code,
    )


def error_body(error: PdserveError) -> bytes:
    return msgspec.json.encode(ErrorResponse(error_info(error)))


class ErrorFormat(ABC):
    """A protocol's form of errors, and its headers with the request id."""

    id_headers: ClassVar[Sequence[bytes]]  # response headers with the id of the request

    @abstractmethod
    def body(self, error: PdserveError, request_id: str | None) -> bytes:
        """Return the JSON of an error."""

    @abstractmethod
    def http_body(self, status: int, message: str) -> bytes:
        """Return the JSON of a failure of HTTP itself, such as an unknown path."""


class OpenAIErrors(ErrorFormat):
    id_headers = (b"x-request-id",)

    def body(self, error: PdserveError, request_id: str | None) -> bytes:
        return error_body(error)

    def http_body(self, status: int, message: str) -> bytes:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        info = ErrorInfo(message=cut(message, MAX_MESSAGE), type=kind, param=None, code=None)
        return msgspec.json.encode(ErrorResponse(info))


OPENAI_ERRORS = OpenAIErrors()
