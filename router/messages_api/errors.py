"""Anthropic's error object."""

from __future__ import annotations

import msgspec

from pdserve.errors import PdserveError, RequestTooLong, cut
from router.errors import MAX_MESSAGE, status_and_type

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


def encode_messages_error(status: int, message: str, request_id: str | None = None) -> bytes:
    kind = _TYPES.get(status, "api_error")
    return msgspec.json.encode(MessagesErrorResponse(MessagesError(kind, cut(message, MAX_MESSAGE)), request_id))


def messages_error_body(error: PdserveError, request_id: str | None = None) -> bytes:
    message = str(error)
    if isinstance(error, RequestTooLong):
        message = f"prompt is too long: {message}"  # agents look for these words, and shorten the conversation
    return encode_messages_error(status_and_type(error)[0], message, request_id)
