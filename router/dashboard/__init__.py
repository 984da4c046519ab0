"""The live page of a router, and what it shows: a second's look at clients and nodes.

    Metrics ──each second──► TrafficLog ──┐
    NodeClient (Watch) ───────────────────┼──► DashboardState ──► /dashboard/state ──► page/, pdserve top
    Node.Status ──while somebody looks──► Asking

``page/`` is what browsers get, as it is: no build step, no other origin.
"""
