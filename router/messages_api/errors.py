"""Anthropic's error object."""

from __future__ import annotations

import msgspec

from pdserve.errors import PdserveError, RequestTooLong, cut
from router.errors import MAX_MESSAGE, ErrorFormat, status_and_type

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesError(msgspec.Struct):
    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, tag="error"):
    error: MessagesError
    request_id: str | None


class MessagesErrors(ErrorFormat):
    id_headers = (b"x-request-id", b"request-id")

    def body(self, error: PdserveError, request_id: str | None) -> bytes:
        message = str(error)
        if isinstance(error, RequestTooLong):
            message = f"prompt is too long: {message}"  # agents look for these words, and shorten the conversation
        return _encode(status_and_type(error)[0], message, request_id)

    def http_body(self, status: int, message: str) -> bytes:
        return _encode(status, message, None)


MESSAGES_ERRORS = MessagesErrors()


def _encode(status: int, message: str, request_id: str | None) -> bytes:
    kind = _TYPES.get(status, "api_error")
    return msgspec.json.encode(MessagesErrorResponse(MessagesError(kind, cut(message, MAX_MESSAGE)), request_id))
