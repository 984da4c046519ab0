"""Errors as HTTP responses: status, headers and OpenAI's error object."""

from __future__ import annotations

import math

from starlette.responses import Response

from pdserve.errors import Overloaded, PdserveError
from router.errors import RateLimitExceeded, Unauthorized, encode_error, error_body, status_and_type


def server_error() -> Response:
    body = encode_error("the router failed to handle this request; see its log", "server_error")
    return Response(body, 500, media_type="application/json")


def error_response(error: PdserveError) -> Response:
    response = Response(error_body(error), status_and_type(error)[0], media_type="application/json")
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimitExceeded | Overloaded):  # whole seconds; 0 would mean "retry at once"
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RateLimitExceeded):
        response.raw_headers += error.headers
    return response
