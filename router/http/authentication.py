"""ASGI middleware that rejects requests without a known API key before it reads their body."""

from __future__ import annotations

import math
from collections.abc import Iterable
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import RateLimitExceeded, Unauthorized
from router.gate.keys import ANONYMOUS, Client, KeyFile, KeyRing
from router.gate.refused_keys import PER_MINUTE, RefusedKeys
from router.http.error_responses import ErrorFormats, error_response
from router.http.request_ids import request_id_of
from router.metrics import RouterMetrics

_CLIENT = "pdserve.client"  # key in the ASGI scope


class KeyCheck:
    """Checks the API keys of requests."""

    def __init__(self, keys: KeyFile | KeyRing, metrics: RouterMetrics) -> None:
        self._keys = keys
        self._metrics = metrics
        self._refused = RefusedKeys()

    def refusal(self, scope: Scope) -> Unauthorized | RateLimitExceeded | None:
        """Note the client of the request's key in ``scope``, or return why the request is refused."""
        key = _api_key(scope["headers"])
        client = None if key is None else self._keys.client_of(key)
        if client is not None:
            scope[_CLIENT] = client
            return None
        self._metrics.unauthorized.inc()
        if key is None:
            return Unauthorized("this router requires an API key; send it as 'Authorization: Bearer KEY'")
        if wait := self._refused.count(address_of(scope), monotonic()):
            self._metrics.unauthorized_limited.inc()
            text = f"more than {PER_MINUTE} unknown API keys per minute came from this address; check the key"
            return RateLimitExceeded(f"{text}, retry in {math.ceil(wait)} s", wait, [(b"connection", b"close")])
        # OpenAI's own words, by which LiteLLM recognizes a wrong key.
        return Unauthorized("Incorrect API key provided; check it, or ask the operator for one")


class Authentication:
    def __init__(self, app: ASGIApp, check: KeyCheck, public_paths: Iterable[str], formats: ErrorFormats) -> None:
        self._app = app
        self._check = check
        self._public_paths = frozenset(public_paths)
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (path := scope["path"]) not in self._public_paths:
            refusal = self._check.refusal(scope)
            if refusal is not None:
                response = error_response(refusal, self._formats.of(path), request_id_of(scope))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
