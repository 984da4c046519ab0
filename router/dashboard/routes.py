"""Routes of the dashboard: the page's files, which hold no data, and its state."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response

from pdserve.top.live import STATE_PATH
from router.dashboard.dashboard_state import DashboardState

PAGE_PATH = "/dashboard"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

# Only scripts, styles and data of this router; no markup from strings; no framing by other pages.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def _read_page() -> dict[str, Response]:
    found: dict[str, Response] = {}
    for file in files("router.dashboard").joinpath("page").iterdir():
        path = PAGE_PATH if file.name == "index.html" else f"{PAGE_PATH}/{file.name}"
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is None:  # an editor's backup
            continue
        found[path] = Response(file.read_bytes(), media_type=kind, headers={**_HEADERS, "cache-control": "no-cache"})
    return found


PAGE = _read_page()


def add_dashboard(app: FastAPI, state: DashboardState) -> None:
    async def page(request: Request) -> Response:
        return PAGE[request.url.path]

    for path in PAGE:
        app.add_api_route(path, page, methods=["GET"])

    @app.get(STATE_PATH)
    async def dashboard_state(epoch: str = "", second: str = "") -> Response:
        """``epoch`` and ``second`` come from the viewer's last report."""
        seen = int(second) if second.isdecimal() and len(second) < 12 else -1
        body = state.report(epoch, seen)
        return Response(body, media_type="application/json", headers={**_HEADERS, "cache-control": "no-store"})
