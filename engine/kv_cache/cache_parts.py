"""Objects that the scheduler shares with its connector side: blocks, slots, events and measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_report import CacheReport
from engine.kv_cache.digest_orders import DigestOrders
from engine.kv_cache.states import States
from engine.step_cost_meter import StepCostMeter
from pdserve.ipc.messages import EventBatch, Totals


@dataclass(slots=True, eq=False)
class CacheParts:
    """One node's objects."""

    pool: BlockPool
    events: EventBatch
    block_size: int  # tokens
    states: States = field(default_factory=States)
    meter: StepCostMeter = field(default_factory=StepCostMeter)
    totals: Totals = field(default_factory=Totals)
    clock: Callable[[], float] = lambda: 0.0  # seconds
    digests: DigestOrders = field(default_factory=DigestOrders)  # numbers of orders are unique in an engine
    report: CacheReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = CacheReport(self.pool, self.states)
