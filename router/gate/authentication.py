"""The door: requests without a known API key end here, before anything of their body is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.gate.keys import ANYONE, Client
from router.http.http_errors import Unauthorized, send_error

_CLIENT = "pdserve.client"  # in the scope


class Authentication:
    """ASGI middleware. Whoever comes in is known to ``client_of(scope)`` from then on."""

    def __init__(
        self,
        app: ASGIApp,
        find: Callable[[bytes], Client | None],
        open_paths: Iterable[str],
        refused: Callable[[], None],
    ) -> None:
        self._app = app
        self._find = find
        self._open_paths = frozenset(open_paths)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            key = _bearer(scope["headers"])
            client = None if key is None else self._find(key)
            if client is None:
                self._refused()
                await send_error(send, _refusal(key))
                return
            scope[_CLIENT] = client
        await self._app(scope, receive, send)


def client_of(scope: Scope) -> Client:
    client = scope.get(_CLIENT, ANYONE)
    assert isinstance(client, Client)
    return client


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key, as RFC 6750 has it; None where there is not exactly one."""
    found = [value for name, value in headers if name == b"authorization"]
    if len(found) != 1:
        return None
    scheme, _, key = found[0].partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def _refusal(key: bytes | None) -> Unauthorized:
    if key is None:
        return Unauthorized("this router wants an API key; send it as 'Authorization: Bearer KEY'")
    # LiteLLM tells a wrong key from other errors by OpenAI's own words, which these are.
    return Unauthorized("Incorrect API key provided; check it, or ask the operator for one")
