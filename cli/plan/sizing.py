"""Find the fewest nodes for a rate, or the highest rate for a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cli.numbers import counted
from cli.plan.node_load import NodeLoad, PlannedRole
from pdserve.errors import CapacityError

_MOST_NODES = 1 << 14
_PRECISION = 1e-3  # relative precision of rates


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes for a rate, in requests per second."""

    rate: float
    prefill: PlannedRole
    decode: PlannedRole
    prefill_needs: str  # bottleneck with one prefill node fewer
    decode_needs: str  # bottleneck with one decode node fewer
    prefill_carries: float  # highest rate without headroom
    decode_carries: float
    prefill_lacks: str  # first bottleneck as the rate grows
    decode_lacks: str
    aggregated: PlannedRole | None  # aggregated nodes for the load; None if no number suffices
    aggregated_lacks: str  # bottleneck of aggregated nodes if no number suffices
    elastic: PlannedRole | None  # elastic nodes for the load; None if no number suffices

    @property
    def nodes(self) -> int:
        return self.prefill.nodes + self.decode.nodes


def plan_for_rate(load: NodeLoad, rate: float) -> Plan:
    """Raises CapacityError if no number of nodes suffices."""
    prefill, prefill_needs = _fewest(lambda nodes: load.on_prefill(rate, nodes), "prefill")
    decode, decode_needs = _fewest(lambda nodes: load.on_decode(rate, nodes), "decode")
    aggregated = _fewest_if_any(lambda nodes: load.aggregated(rate, nodes))
    lacks = "" if aggregated else load.aggregated(rate, _MOST_NODES).lacks
    full = NodeLoad(load.costs, load.workload, load.slo, msgspec.structs.replace(load.limits, headroom=0.0))
    prefill_carries, prefill_lacks = _most(lambda at: full.on_prefill(at, prefill.nodes).lacks, rate)
    decode_carries, decode_lacks = _most(lambda at: full.on_decode(at, decode.nodes).lacks, rate)
    return Plan(
        rate=rate,
        prefill=prefill,
        decode=decode,
        prefill_needs=prefill_needs,
        decode_needs=decode_needs,
        prefill_carries=prefill_carries,
        decode_carries=decode_carries,
        prefill_lacks=prefill_lacks,
        decode_lacks=decode_lacks,
        aggregated=aggregated,
        aggregated_lacks=lacks,
        elastic=_fewest_if_any(lambda nodes: load.elastic(rate, nodes)),
    )


def plan_for_gpus(load: NodeLoad, gpus: int) -> Plan:
    """Return the plan for the highest rate that ``gpus`` can serve. Raises CapacityError if they cannot serve any."""
    nodes = gpus // load.costs.gpus
    if nodes < 2:
        raise CapacityError(
            f"{counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} {counted(nodes, 'node')}; "
            f"a prefill and a decode node need {2 * load.costs.gpus} GPUs; "
            "with fewer, start decode nodes alone, which also compute prompts"
        )
    idle = 1e-6  # requests per second; a load that fails at this rate fails at any
    _fewest(lambda count: load.on_prefill(idle, count), "prefill")
    _fewest(lambda count: load.on_decode(idle, count), "decode")

    def lacks(rate: float) -> str:
        for split in range(1, nodes):
            prefill = load.on_prefill(rate, split)
            if not prefill.lacks:
                return load.on_decode(rate, nodes - split).lacks
        return "nodes"

    rate, _ = _most(lacks, idle)
    return plan_for_rate(load, rate)


def _fewest(try_out: Callable[[int], PlannedRole], what: str) -> tuple[PlannedRole, str]:
    """Return the smallest sufficient number of nodes, by bisection, and the bottleneck with one node fewer."""
    low, high, needs = 0, 1, "a node"
    while (role := try_out(high)).lacks:
        low, needs = high, role.lacks
        if high >= _MOST_NODES:
            raise CapacityError(
                f"no number of {what} nodes suffices: with {_MOST_NODES} the bottleneck is {needs}; {_best(role)}"
                "relax the SLO or choose faster nodes (more tensor shards, another GPU)"
            )
        high *= 2
    found = role
    while high - low > 1:
        middle = (low + high) // 2
        role = try_out(middle)
        if role.lacks:
            low, needs = middle, role.lacks
        else:
            high, found = middle, role
    return found, needs


def _fewest_if_any(try_out: Callable[[int], PlannedRole]) -> PlannedRole | None:
    try:
        return _fewest(try_out, "such")[0]
    except CapacityError:
        return None


def _best(role: PlannedRole) -> str:
    parts = [
        f"{name} p{p} is {1e3 * s:.0f} ms"
        for name, of in (("TTFT", role.ttft), ("ITL", role.itl))
        for p, s in of.items()
    ]
    return f"when idle, {', '.join(parts)}; " if parts else ""


def _most(lacks: Callable[[float], str], enough: float) -> tuple[float, str]:
    """Return the highest rate without a bottleneck, starting from a feasible one, and the bottleneck beyond it."""
    low, high = enough, 2 * enough
    while not (word := lacks(high)):
        low, high = high, 2 * high
    if low == enough and lacks(low):
        return 0.0, lacks(low)
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        if found := lacks(middle):
            high, word = middle, found
        else:
            low = middle
    return low, word
