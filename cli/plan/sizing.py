"""Find the fewest nodes for a rate, or the highest rate for a number of GPUs.

Arithmetic bounds the search: nodes do no more work than they have time, so fleets below ``least_nodes`` are never
simulated. Decode nodes compute prompts too, so the work of prompts bounds the number of all nodes only. Among the
others, a fleet suffices if it keeps all limits in a simulation, at a rate that leaves headroom. Fleets of more than
``MOST_SIMULATED`` nodes are sized as several smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil

import msgspec

from cli.numbers import counted, figure
from cli.plan.prediction import Layout, Prediction, predict
from cli.plan.predictor import Predictor
from pdserve.errors import CapacityError

MOST_SIMULATED = 6  # nodes of a simulated fleet
_HALVINGS = 4  # halvings of the range of rates: to 6 % of what the nodes' work allows
_FIRST_SHARE = 0.75  # share of that rate that is simulated first: most fleets serve 60 to 90 % of it
_BEST_SPLITS = 3  # splits of a number of nodes that are simulated: those whose roles are the most balanced
_IDLE_SHARE = 0.02  # share of the rate that two nodes' work allows, at which requests hardly meet
_IDLE_REQUESTS = 40


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """A sufficient fleet: ``layout``, or several fleets like the simulated one."""

    layout: Layout
    prediction: Prediction  # the simulated fleet, at its share of the rate; ``headroom`` is left


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Fleets for a rate, in requests per second."""

    rate: float
    split: Fleet  # prefill and decode nodes
    prefill_needs: str  # what is missed with one prefill node fewer
    decode_needs: str  # what is missed with one decode node fewer
    aggregated: Fleet | None  # decode nodes without prefill nodes; None if no number suffices
    aggregated_lacks: str  # what they miss if no number suffices
    elastic: Fleet | None  # nodes of both roles; None if no number suffices
    elastic_lacks: str

    @property
    def nodes(self) -> int:
        return self.split.layout.nodes


def plan_for_rate(predictor: Predictor, rate: float) -> Plan:
    """Raises CapacityError if no number of nodes suffices."""
    search = _Search(predictor)
    search.check_idle()
    limits = predictor.load.limits
    full_rate = rate / (1.0 - limits.headroom)
    if splits := search.fewest_splits(full_rate):
        return search.plan(rate, 1.0, splits)
    split, capacity = search.best_split(MOST_SIMULATED)
    fleet_rate = (1.0 - limits.headroom) * capacity
    return search.plan(rate, rate / fleet_rate, [split])


def plan_for_gpus(predictor: Predictor, gpus: int) -> Plan:
    """Return the plan for the highest rate that ``gpus`` can serve. Raises CapacityError if they cannot serve any."""
    load = predictor.load
    nodes = gpus // load.costs.gpus
    if nodes < 2:
        raise CapacityError(
            f"{counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} {counted(nodes, 'node')}; "
            f"a prefill and a decode node need {2 * load.costs.gpus} GPUs; "
            "with fewer, start decode nodes alone, which also compute prompts"
        )
    search = _Search(predictor)
    search.check_idle()
    simulated = min(nodes, MOST_SIMULATED)
    split, capacity = search.best_split(simulated)
    times = nodes / simulated
    prefill = min(nodes - 1, max(1, round(times * split.prefill)))
    rate = times * (1.0 - load.limits.headroom) * capacity
    return search.plan(rate, times, [split], Layout(prefill, nodes - prefill))


class _Search:
    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._load = predictor.load
        self._headroom = predictor.load.limits.headroom

    # ------------------------------------------------------------ bounds

    def highest_rate(self, layout: Layout) -> float:
        """Return the rate at which the work of the requests takes all time of the nodes."""
        load = self._load
        rate = layout.nodes / (load.prompt_work + load.decode_work)
        return min(rate, layout.decode / load.decode_work) if layout.prefill else rate

    def balanced_rate(self, layout: Layout) -> float:
        """Return the rate at which one role of a split is busy all the time, if each does its own work only."""
        prefill, decode = self._works()
        return min(layout.prefill / prefill, layout.decode / decode)

    def least_nodes(self, rate: float) -> tuple[int, int]:
        """Return how many nodes the work of the requests takes at least, and how many decode nodes."""
        load = self._load
        return _at_least(rate * (load.prompt_work + load.decode_work)), _at_least(rate * load.decode_work)

    def _works(self) -> tuple[float, float]:
        """Seconds of a prefill and of a decode node per request that is handed off."""
        load = self._load
        return max(load.prompt_work, load.read_work), max(load.decode_work, load.read_work)

    def _bound_by(self, prefill: bool) -> str:
        """Return what a role lacks that is busy all the time."""
        load = self._load
        if load.read_work > (load.prompt_work if prefill else load.decode_work):
            return "network"
        limit = load.max_batch[1]
        return "compute" if prefill else "decode steps" if limit == "max-num-seqs" else limit

    def check_idle(self) -> None:
        """Raise CapacityError if idle nodes miss the SLO: then no number of nodes suffices."""
        load = self._load
        if not (load.slo.ttft or load.slo.itl):
            return
        layout = Layout(prefill=1, decode=1)
        rate = _IDLE_SHARE * self.highest_rate(layout)
        prediction = predict(load, layout, rate, load.draw(_IDLE_REQUESTS))
        if prediction.missed:
            raise CapacityError(
                f"no number of nodes suffices: idle ones miss {prediction.missed}, {_idle_times(prediction)}; "
                "relax the SLO or choose faster nodes (more tensor shards, another GPU)"
            )

    # ------------------------------------------------------------ search

    def fewest_splits(self, rate: float) -> list[Layout]:
        """Return the sufficient splits of the fewest nodes; empty if more than MOST_SIMULATED are needed."""
        least, least_decode = self.least_nodes(rate)
        for nodes in range(max(least, 1 + least_decode), MOST_SIMULATED + 1):
            layouts = self._likely_splits(nodes, least_decode)
            predictions = self._predictor.predict(layouts, rate)
            if splits := [layout for layout in layouts if not predictions[layout].missed]:
                return splits
        return []

    def _likely_splits(self, nodes: int, least_decode: int = 1) -> list[Layout]:
        """Return the splits of so many nodes that are simulated, the most balanced first."""
        layouts = [Layout(prefill, nodes - prefill) for prefill in range(1, nodes - least_decode + 1)]
        return sorted(layouts, key=self.balanced_rate, reverse=True)[:_BEST_SPLITS]

    def fewest(self, role: str, rate: float) -> tuple[Layout | None, str]:
        """Return the smallest sufficient fleet of nodes of one role, and what the largest insufficient one misses.

        The fleet is None if more than MOST_SIMULATED are needed.
        """
        lacks = "compute"
        least = max(1, ceil(rate / self.highest_rate(_of_role(role, 1)) - 1e-9))
        for nodes in range(least, MOST_SIMULATED + 1):
            layout = _of_role(role, nodes)
            missed = self._predictor.predict([layout], rate)[layout].missed
            if not missed:
                return layout, lacks
            lacks = missed
        return None, lacks

    def best(self, layouts: Sequence[Layout]) -> tuple[Layout, float, str]:
        """Return the fleet that keeps all limits at the highest rate, that rate, and the limit that it misses beyond.

        The rate is 0 if no fleet keeps them at any. A fleet that misses one where another one keeps all is left out.
        """
        low = 0.0
        high = max(map(self.highest_rate, layouts))
        lacks = self._bound_by(prefill=True)
        rate = _FIRST_SHARE * high
        for _ in range(_HALVINGS):
            predictions = self._predictor.predict(layouts, rate)
            sufficient = [layout for layout in layouts if not predictions[layout].missed]
            if sufficient:
                layouts = sorted(sufficient, key=lambda layout: self._load.nearness(predictions[layout]))
                low = rate
            else:
                lacks = predictions[layouts[0]].missed
                high = rate
            rate = (low + high) / 2
        return layouts[0], low, lacks

    def best_split(self, nodes: int) -> tuple[Layout, float]:
        """Return the split of so many nodes that serves the highest rate, and that rate. Raises CapacityError."""
        split, rate, lacks = self.best(self._likely_splits(nodes))
        if not rate:
            raise CapacityError(
                f"{counted(nodes, 'node')} cannot keep the limits at any rate: they miss {lacks}; "
                "relax the SLO, take more nodes or faster ones"
            )
        return split, rate

    # ------------------------------------------------------------ the plan

    def plan(self, rate: float, times: float, splits: Sequence[Layout], split_layout: Layout | None = None) -> Plan:
        """Plan fleets for a rate. ``splits`` suffice for ``1 / times`` of it; the best one is taken ``times`` times.

        ``split_layout`` is then taken in its place, if the number of nodes is given.
        """
        with ThreadPoolExecutor(3) as threads:
            aggregated = threads.submit(self._fleet_of_role, "decode", rate, times)
            elastic = threads.submit(self._fleet_of_role, "both", rate, times)
            predictions = self._predictor.predict(splits, rate / times)
            split = min(splits, key=lambda layout: self._load.nearness(predictions[layout]))
            prefill_needs = self._missed_without(split, Layout(prefill=1), rate / times)
            decode_needs = self._missed_without(split, Layout(decode=1), rate / times)
            aggregated_fleet, aggregated_lacks = aggregated.result()
            elastic_fleet, elastic_lacks = elastic.result()
        return Plan(
            rate=rate,
            split=Fleet(layout=split_layout or _times(split, times), prediction=predictions[split]),
            prefill_needs=prefill_needs,
            decode_needs=decode_needs,
            aggregated=aggregated_fleet,
            aggregated_lacks=aggregated_lacks,
            elastic=elastic_fleet,
            elastic_lacks=elastic_lacks,
        )

    def _fleet_of_role(self, role: str, rate: float, times: float) -> tuple[Fleet | None, str]:
        """Return the smallest fleet of nodes of one role for a rate, and what a smaller one misses."""
        full_rate = rate / times / (1.0 - self._headroom)
        layout, lacks = self.fewest(role, full_rate)
        if layout is None:
            layout, capacity, lacks = self.best([_of_role(role, MOST_SIMULATED)])
            if not capacity:
                return None, lacks
            times *= full_rate / capacity
        prediction = self._predictor.predict([layout], rate / times)[layout]
        return Fleet(layout=_times(layout, times), prediction=prediction), lacks

    def _missed_without(self, split: Layout, node: Layout, rate: float) -> str:
        """Return what a split misses without one of its nodes: what keeps its role busy all the time, or a limit."""
        full_rate = rate / (1.0 - self._headroom)
        layout = Layout(split.prefill - node.prefill, split.decode - node.decode)
        least, least_decode = self.least_nodes(full_rate)
        if layout.nodes < least or layout.decode < least_decode:
            return self._bound_by(prefill=node.prefill == 1)
        missed = self._predictor.predict([layout], full_rate)[layout].missed
        is_overloaded = missed and self.balanced_rate(layout) < full_rate
        return self._bound_by(prefill=node.prefill == 1) if is_overloaded else missed


def _at_least(nodes: float) -> int:
    return max(1, ceil(nodes - 1e-9))


def _of_role(role: str, nodes: int) -> Layout:
    return Layout(decode=nodes) if role == "decode" else Layout(both=nodes)


def _times(layout: Layout, times: float) -> Layout:
    """Return a fleet of so many times as many nodes, rounded up."""
    return Layout(*(ceil(times * nodes - 1e-9) for nodes in layout))


def _idle_times(prediction: Prediction) -> str:
    return ", ".join(
        f"{name} p{percent} is {figure(1e3 * seconds)} ms"
        for name, times in (("TTFT", prediction.ttft), ("ITL", prediction.itl))
        for percent, seconds in times.items()
    )
