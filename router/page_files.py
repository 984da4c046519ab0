"""Static files of the router's web pages, with strict headers. Files hold no data and need no API key."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

# Only scripts, styles and data of this router; no markup from strings; no framing by other pages.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def read_page(package: str, index_path: str, folder_path: str) -> dict[str, Response]:
    """Return the responses of ``page/`` in a package by path: index.html at ``index_path``, others in the folder."""
    found: dict[str, Response] = {}
    for file in files(package).joinpath("page").iterdir():
        path = index_path if file.name == "index.html" else f"{folder_path}/{file.name}"
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is None:  # an editor's backup
            continue
        found[path] = Response(file.read_bytes(), media_type=kind, headers={**HEADERS, "cache-control": "no-cache"})
    return found


def add_page(app: FastAPI, page: dict[str, Response]) -> None:
    async def serve(request: Request) -> Response:
        return page[request.url.path]

    for path in page:
        app.add_api_route(path, serve, methods=["GET"])
