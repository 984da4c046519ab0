"""Errors as HTTP responses: status, headers and the error object of the path's protocol."""

from __future__ import annotations

import math

from starlette.responses import Response

from pdserve.errors import Overloaded, PdserveError
from router.errors import CrashingRequest, RateLimitExceeded, Unauthorized, encode_error, error_body, status_and_type
from router.http.request_ids import request_id_headers, speaks_anthropic
from router.messages_api.errors import encode_messages_error, messages_error_body


def error_response(error: PdserveError, path: str, request_id: str | None = None) -> Response:
    body = messages_error_body(error, request_id) if speaks_anthropic(path) else error_body(error)
    response = Response(body, status_and_type(error)[0], media_type="application/json")
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimitExceeded | Overloaded):  # whole seconds; 0 would mean "retry at once"
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RateLimitExceeded):
        response.raw_headers += error.headers
    if isinstance(error, CrashingRequest):
        response.headers["x-should-retry"] = "false"  # the SDKs of OpenAI and Anthropic repeat a 500 otherwise
    if request_id is not None:
        response.raw_headers += request_id_headers(path, request_id)
    return response


def http_error(status: int, message: str, path: str) -> Response:
    """A failure of HTTP itself, such as an unknown path."""
    if speaks_anthropic(path):
        body = encode_messages_error(status, message)
    else:
        body = encode_error(message, "server_error" if status >= 500 else "invalid_request_error")
    return Response(body, status, media_type="application/json")


def server_error(path: str) -> Response:
    return http_error(500, "the router failed to handle this request; see its log", path)
