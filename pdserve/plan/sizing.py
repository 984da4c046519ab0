"""The fewest nodes that suffice, for a rate; and the highest rate, for a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.errors import CapacityError
from pdserve.plan.node_load import NodeLoad, PlannedRole

_MOST_NODES = 1 << 14
_PRECISION = 1e-3  # of rates


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``rate`` is in requests per second. A rate that nodes carry leaves nothing of the head-room."""

    rate: float
    prefill: PlannedRole
    decode: PlannedRole
    prefill_needs: str  # what one prefill node fewer would lack
    decode_needs: str
    prefill_carries: float
    decode_carries: float
    prefill_lacks: str  # what prefill nodes lack first as the rate grows
    decode_lacks: str
    aggregated: PlannedRole | None  # as many nodes as do the same by themselves; None: no number of them does
    aggregated_lacks: str  # then what they lack

    @property
    def nodes(self) -> int:
        return self.prefill.nodes + self.decode.nodes


def plan_for_rate(load: NodeLoad, rate: float) -> Plan:
    """Raises CapacityError where no number of nodes suffices."""
    prefill, prefill_needs = _fewest(lambda nodes: load.on_prefill(rate, nodes), "prefill")
    decode, decode_needs = _fewest(lambda nodes: load.on_decode(rate, nodes), "decode")
    try:
        aggregated: PlannedRole | None = _fewest(lambda nodes: load.aggregated(rate, nodes), "aggregated")[0]
        lacks = ""
    except CapacityError:
        aggregated, lacks = None, load.aggregated(rate, _MOST_NODES).lacks
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
    )


def plan_for_gpus(load: NodeLoad, gpus: int) -> Plan:
    """At the highest rate that so many GPUs suffice for. Raises CapacityError where there are too few for any."""
    nodes = gpus // load.costs.gpus
    if nodes < 2:
        raise CapacityError(
            f"{gpus} GPUs are {nodes} nodes; a prefill and a decode node take {2 * load.costs.gpus} GPUs; "
            "on fewer start decode nodes alone: they compute prompts as well"
        )
    idle = 1e-6  # requests per second: whatever cannot be served at this rate never can
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
    """The smallest number that lacks nothing, by halving; and what one less would lack."""
    low, high, needs = 0, 1, "a node"
    while (role := try_out(high)).lacks:
        low, needs = high, role.lacks
        if high >= _MOST_NODES:
            raise CapacityError(
                f"no number of {what} nodes suffices: {_MOST_NODES} lack {needs}; {_best(role)}allow more, or choose "
                "faster nodes (more tensor shards, another GPU)"
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


def _best(role: PlannedRole) -> str:
    """The figures of nodes that are all but idle."""
    parts = [
        f"{name} p{p} is {1e3 * s:.0f} ms"
        for name, of in (("TTFT", role.ttft), ("ITL", role.itl))
        for p, s in of.items()
    ]
    return f"when idle, {', '.join(parts)}; " if parts else ""


def _most(lacks: Callable[[float], str], enough: float) -> tuple[float, str]:
    """The highest rate at which nothing is lacking, from one that is low enough; and what lacks beyond it."""
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
