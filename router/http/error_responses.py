"""Errors as HTTP responses: status, headers and the error object of the path's dialect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from pdserve.errors import Overloaded, PdserveError
from router.dialect.dialect import Dialect
from router.errors import (
    OPENAI_ERRORS,
    CrashingRequest,
    ErrorFormat,
    RateLimitExceeded,
    Unauthorized,
    status_and_type,
)
from router.http.request_ids import request_id_headers

SERVER_FAILURE = "the router failed to handle this request; see its log"


class ErrorFormats:
    """The error format of each path: that of the dialect whose path it begins with, or OpenAI's."""

    def __init__(self, dialects: Iterable[Dialect[Any]]) -> None:
        self._formats = {path: dialect.errors for dialect in dialects for path in dialect.paths}

    def of(self, path: str) -> ErrorFormat:
        formats = (errors for own, errors in self._formats.items() if path == own or path.startswith(own + "/"))
        return next(formats, OPENAI_ERRORS)


def error_response(error: PdserveError, errors: ErrorFormat, request_id: str | None = None) -> Response:
    response = Response(errors.body(error, request_id), status_and_type(error)[0], media_type="application/json")
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimitExceeded | Overloaded):  # whole seconds; 0 would mean "retry at once"
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RateLimitExceeded):
        response.raw_headers += error.headers
    if isinstance(error, CrashingRequest):
        response.headers["x-should-retry"] = "false"  # the SDKs of OpenAI and Anthropic repeat a 500 otherwise
    if request_id is not None:
        response.raw_headers += request_id_headers(errors, request_id)
    return response


def http_error(status: int, message: str, errors: ErrorFormat) -> Response:
    """A failure of HTTP itself, such as an unknown path."""
    return Response(errors.http_body(status, message), status, media_type="application/json")


def server_error(errors: ErrorFormat) -> Response:
    return http_error(500, SERVER_FAILURE, errors)
