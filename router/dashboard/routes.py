"""Routes of the dashboard: the page's files and its state."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.dashboard.dashboard_state import DashboardState
from router.dashboard.live import STATE_PATH
from router.page_files import HEADERS, add_page, read_page
from router.routes import Routes

PAGE = read_page("router.dashboard", "/dashboard", "/dashboard")


def add_dashboard(routes: Routes, state: DashboardState) -> None:
    add_page(routes, PAGE)

    @routes.get(STATE_PATH)
    async def dashboard_state(request: Request) -> Response:
        """``epoch`` and ``second`` come from the viewer's last report."""
        epoch, second = (request.query_params.get(name, "") for name in ("epoch", "second"))
        seen = int(second) if second.isdecimal() and len(second) < 12 else -1
        body = state.report(epoch, seen)
        return Response(body, media_type="application/json", headers={**HEADERS, "cache-control": "no-store"})
