"""Routes of the dashboard: the page's files and its state."""

from __future__ import annotations

from fastapi import FastAPI, Response

from router.dashboard.dashboard_state import DashboardState
from router.dashboard.live import STATE_PATH
from router.page_files import HEADERS, add_page, read_page

PAGE = read_page("router.dashboard", "/dashboard", "/dashboard")


def add_dashboard(app: FastAPI, state: DashboardState) -> None:
    add_page(app, PAGE)

    @app.get(STATE_PATH)
    async def dashboard_state(epoch: str = "", second: str = "") -> Response:
        """``epoch`` and ``second`` come from the viewer's last report."""
        seen = int(second) if second.isdecimal() and len(second) < 12 else -1
        body = state.report(epoch, seen)
        return Response(body, media_type="application/json", headers={**HEADERS, "cache-control": "no-store"})
