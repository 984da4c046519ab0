"""Headers of a scheduler in front of the router (llm-d's names): a node and objectives for one request.

They are read with ``--trust-routing-headers`` only, because any client can send them.
"""

from __future__ import annotations

import math

from starlette.types import Scope

from pdserve.errors import RequestError, shown
from router.fleet.policy import NO_HINT, RoutingHint

PREFILLER = "x-prefiller-host-port"
TTFT = "x-llm-d-slo-ttft-ms"
TPOT = "x-llm-d-slo-tpot-ms"
_MOST_PREFILLERS = 16


def routing_hint(scope: Scope, trusted: bool) -> RoutingHint:
    """Return the wishes in the headers. Raises RequestError for malformed values."""
    if not trusted:
        return NO_HINT
    values = {name.decode("latin-1"): value.decode("latin-1").strip() for name, value in scope["headers"]}
    prefill = tuple(filter(None, (address.strip() for address in values.get(PREFILLER, "").split(","))))
    if len(prefill) > _MOST_PREFILLERS:
        raise RequestError(f"{PREFILLER} names {len(prefill)} nodes; name at most {_MOST_PREFILLERS}")
    return RoutingHint(prefill, _seconds(values, TTFT), _seconds(values, TPOT))


def _seconds(values: dict[str, str], name: str) -> float:
    if not (text := values.get(name, "")):
        return math.inf
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0.0 < milliseconds < math.inf:
        raise RequestError(f"{name} {shown(text)} is not a number of milliseconds above 0")
    return milliseconds / 1e3
