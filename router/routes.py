"""Routes of the HTTP application, which the modules of endpoints add."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

Endpoint = Callable[[Request], Awaitable[Response]]


class Routes:
    """Endpoints by path and method. The first route that matches is taken."""

    def __init__(self) -> None:
        self.all: list[Route] = []

    def add(self, path: str, endpoint: Endpoint | ASGIApp, method: str) -> None:
        """``path`` may have parameters, as ``{name}``; HEAD is not GET here."""
        route = Route(path, endpoint, methods=[method])
        route.methods = {method}
        self.all.append(route)

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._adder(path, "GET")

    def post(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._adder(path, "POST")

    def delete(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._adder(path, "DELETE")

    def _adder(self, path: str, method: str) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator."""

        def add(endpoint: Endpoint) -> Endpoint:
            self.add(path, endpoint, method)
            return endpoint

        return add
