"""The id of a request: the client's, or a new one; in the answer, in logs and in traces."""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.types import Message, Scope, Send

from router.errors import ErrorFormat

_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # nothing that ends a log line or a header


def given_request_id(scope: Scope) -> str | None:
    """Return the client's X-Request-Id, unless it is too long or has other characters."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _SAFE_ID.fullmatch(given) else None


def request_id_of(scope: Scope) -> str:
    """Return the client's id, or a new one."""
    return given_request_id(scope) or uuid4().hex


def request_id_headers(errors: ErrorFormat, request_id: str) -> list[tuple[bytes, bytes]]:
    return [(name, request_id.encode()) for name in errors.id_headers]


def send_with_id(scope: Scope, send: Send, errors: ErrorFormat) -> Send:
    """Add the id to the answer."""
    headers = request_id_headers(errors, request_id_of(scope))

    async def send_message(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_message
