"""Static files of the router's web pages, with strict headers. Files hold no data and need no API key."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request, Response

_KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
}

# Only scripts, styles and data of this router; no markup from strings; no framing by other pages.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src {}; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types {}"
)
HEADERS = {
    "content-security-policy": _POLICY.format("'self'", "'none'"),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def read_page(
    package: str, index_path: str, folder_path: str, sanitizer: str = "'none'", images: str = "'self'"
) -> dict[str, Response]:
    """Return the responses of ``page/`` in a package by path: index.html at ``index_path``, others in the folder.

    ``sanitizer`` is the trusted types policy that alone may turn strings into markup on this page, ``images`` the
    sources of its images.
    """
    policy = _POLICY.format(images, sanitizer)
    headers = HEADERS | {"content-security-policy": policy, "cache-control": "no-cache"}
    responses: dict[str, Response] = {}
    for name, file in _files(files(package).joinpath("page")):
        path = index_path if name == "index.html" else f"{folder_path}/{name}"
        kind = _KINDS.get(name.rpartition(".")[2])
        if kind is not None:  # other kinds: licences, an editor's backup
            responses[path] = Response(file.read_bytes(), media_type=kind, headers=headers)
    return responses


def _files(folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    """Yield the files below a folder with their relative paths."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from ((f"{entry.name}/{name}", file) for name, file in _files(entry))
        else:
            yield entry.name, entry


def add_page(app: FastAPI, page: dict[str, Response]) -> None:
    async def serve(request: Request) -> Response:
        return page[request.url.path]

    for path in page:
        app.add_api_route(path, serve, methods=["GET"])
