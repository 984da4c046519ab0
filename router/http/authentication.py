"""ASGI middleware that rejects requests without a known API key before it reads their body."""

from __future__ import annotations

import math
from collections.abc import Iterable
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import RateLimitExceeded, Unauthorized
from router.gate.keys import ANONYMOUS, Client, KeyFile, KeyRing
from router.gate.refused_keys import PER_MINUTE, RefusedKeys
from router.http.error_responses import error_response
from router.http.request_ids import request_id_of
from router.metrics import RouterMetrics

_CLIENT = "pdserve.client"  # key in the ASGI scope


class Authentication:
    def __init__(
        self, app: ASGIApp, keys: KeyFile | KeyRing, public_paths: Iterable[str], metrics: RouterMetrics
    ) -> None:
        self._app = app
        self._keys = keys
        self._public_paths = frozenset(public_paths)
        self._metrics = metrics
        self._refused = RefusedKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in self._public_paths:
            key = _api_key(scope["headers"])
            client = None if key is None else self._keys.client_of(key)
            if client is None:
                error = self._refusal(key, address_of(scope))
                await error_response(error, scope["path"], request_id_of(scope))(scope, receive, send)
                return
            scope[_CLIENT] = client
        await self._app(scope, receive, send)

    def _refusal(self, key: bytes | None, address: str) -> Unauthorized | RateLimitExceeded:
        self._metrics.unauthorized.inc()
        if key is None:
            return Unauthorized("this router requires an API key; send it as 'Authorization: Bearer KEY'")
        if wait := self._refused.count(address, monotonic()):
            self._metrics.unauthorized_limited.inc()
            text = f"more than {PER_MINUTE} unknown API keys per minute came from this address; check the key"
            return RateLimitExceeded(f"{text}, retry in {math.ceil(wait)} s", wait, [(b"connection", b"close")])
        # LiteLLM recognizes a wrong key by OpenAI's own words, which these are.
        return Unauthorized("Incorrect API key provided; check it, or ask the operator for one")


def client_of(scope: Scope) -> Client:
    client = scope.get(_CLIENT, ANONYMOUS)
    assert isinstance(client, Client)
    return client


def address_of(scope: Scope) -> str:
    """The IP address of the connection's other end; empty for a Unix socket. No header changes it."""
    peer = scope.get("client")
    return peer[0] if peer else ""


def _api_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key as RFC 6750 writes it or, without an ``Authorization``, in ``X-Api-Key``; None unless there is one."""
    by_name: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
    for name, value in headers:
        if name in by_name:
            by_name[name].append(value)
    bearers, keys = by_name.values()
    if not bearers:
        return keys[0].strip() or None if len(keys) == 1 else None
    scheme, _, key = bearers[0].partition(b" ")
    return key.strip() or None if len(bearers) == 1 and scheme.lower() == b"bearer" else None
