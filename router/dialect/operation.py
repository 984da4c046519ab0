"""One method of one path, as the OpenAPI document describes it."""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from router.errors import ErrorResponse

ANY = (401, 500)  # statuses of every route
WITH_BODY = (*ANY, 400, 404, 413, 504)
COMPUTES = (*WITH_BODY, 429, 502, 503)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    summary: str
    response: type | None  # None: plain text
    is_list: bool = False  # the response is a list of these
    method: str = "post"
    path: str = ""  # replaced by a dialect's paths
    statuses: Sequence[int] = ANY
    body: type | None = None
    chat_fields: Set[str] = frozenset()  # fields of a chat that the body may have, too
    streams: bool = False
    query: type | None = None
    error: type = ErrorResponse
