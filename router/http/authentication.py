"""ASGI middleware that rejects requests without a known API key before it reads their body."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import Unauthorized
from router.gate.keys import ANONYMOUS, Client, KeyFile
from router.http.error_responses import error_response
from router.metrics import RouterMetrics

_CLIENT = "pdserve.client"  # key in the ASGI scope


class Authentication:
    def __init__(self, app: ASGIApp, keys: KeyFile, public_paths: Iterable[str], metrics: RouterMetrics) -> None:
        self._app = app
        self._keys = keys
        self._public_paths = frozenset(public_paths)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public_paths:
            key = _bearer_token(scope["headers"])
            client = None if key is None else self._keys.client_of(key)
            if client is None:
                self._metrics.unauthorized.inc()
                await error_response(_unauthorized(key))(scope, receive, send)
                return
            scope[_CLIENT] = client
        await self._app(scope, receive, send)


def client_of(scope: Scope) -> Client:
    client = scope.get(_CLIENT, ANONYMOUS)
    assert isinstance(client, Client)
    return client


def address_of(scope: Scope) -> str:
    """The IP address of the connection's other end; empty for a Unix socket. No header changes it."""
    peer = scope.get("client")
    return peer[0] if peer else ""


def _bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key as RFC 6750 writes it; None unless there is exactly one."""
    found = [value for name, value in headers if name == b"authorization"]
    if len(found) != 1:
        return None
    scheme, _, key = found[0].partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def _unauthorized(key: bytes | None) -> Unauthorized:
    if key is None:
        return Unauthorized("this router requires an API key; send it as 'Authorization: Bearer KEY'")
    # LiteLLM recognizes a wrong key by OpenAI's own words, which these are.
    return Unauthorized("Incorrect API key provided; check it, or ask the operator for one")
