"""HTTP servers of routers and of nodes' metrics: bounded connections, a parser of requests, ``/metrics``."""
