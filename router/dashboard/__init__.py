"""The live dashboard of a router.

    RouterMetrics ──each second──────► TrafficLog ──┐
    NodeClient (Watch) ─────────────────────────────┼──► DashboardState ──► /dashboard/state ──► page/
    Node.Status ──while viewed──► StatusPoller ─────┘

Browsers get the files in ``page/`` unchanged: no build step, no other origin.
"""
