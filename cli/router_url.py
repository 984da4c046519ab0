"""URL and API key of the commands that talk to a router, and connection errors in words."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from pdserve.errors import ConfigError, NodeError, shown

KEY_VARIABLE = "PDSERVE_API_KEY"


def add_router_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="default %(default)s")
    parser.add_argument("--api-key", metavar="KEY", help="API key for the router (default: PDSERVE_API_KEY)")


def base_url(text: str) -> str:
    """Return scheme, host and port of a router's URL; a path of the API or the dashboard is removed."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    for path in ("/dashboard", "/v1"):
        url = url.removesuffix(path)
    return url


def api_key(args: argparse.Namespace) -> str:
    """Return the key of ``--api-key`` or the environment, "" without. Raises ConfigError."""
    key = str(args.api_key or os.environ.get(KEY_VARIABLE, ""))
    if not key.isascii() or not key.isprintable():
        raise ConfigError("the API key is not printable ASCII; check --api-key")
    return key


def key_headers(args: argparse.Namespace) -> dict[str, str]:
    """Return the header with the key of ``--api-key`` or the environment, if any. Raises ConfigError."""
    key = api_key(args)
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def connection_errors(url: str) -> Iterator[None]:
    """Raise ConfigError or NodeError in place of httpx's errors."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
        raise ConfigError(f"{shown(url)} is not the URL of a router: {exc}; write http://HOST:PORT") from exc
    except httpx.TransportError as exc:
        reason = f"no answer from {url}: {str(exc) or 'timeout'}"
        raise NodeError(f"{reason}; check the address, and that the router runs") from exc


def wants_key(url: str) -> ConfigError:
    return ConfigError(f"{url} requires a valid API key; give it by {KEY_VARIABLE} or --api-key")
