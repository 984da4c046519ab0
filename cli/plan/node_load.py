"""Model a load on a number of nodes: utilisation, TTFT, ITL, and the first bottleneck.

Each role is modelled alone: prompts reach decode nodes at their arrival times, regardless of their time on P.
``aggregated`` nodes do both, like decode nodes without prefill nodes. ``elastic`` nodes do both, and lean: as many
nodes as the prompts need compute prompts, and the others decode; one does both in part if too few would decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import ceil
from statistics import fmean

import msgspec

from cli.plan.costs import Costs
from cli.plan.queues import beside, occupancy, percentile, waits, weighted_percentile
from cli.plan.workload import Workload
from pdserve.errors import ConfigError
from pdserve.request_cost import AUTO_ITL_STEPS, auto_itl_target

_FULL = 0.01  # accepted share of time in which a decode node is full, so that new requests wait
_RARE = 1e-7  # batch sizes with a smaller share of the busy time are ignored
_JOINING_STEPS = 2.5  # steps until a joining sequence has its token: half of one, one in flight, its own
_BESIDE_DECODES = AUTO_ITL_STEPS / (AUTO_ITL_STEPS - 1.0)  # factor on the duration of a prompt alone
_REPORTED = (50, 99)  # percentiles to report beside the SLO


class Slo(msgspec.Struct, frozen=True):
    """Limits in seconds by percentile."""

    ttft: dict[int, float] = {}
    itl: dict[int, float] = {}


class LoadLimits(msgspec.Struct, frozen=True):
    """Limits of each node."""

    headroom: float = 0.2  # share of a node's capacity kept free for bursts, growth and lost nodes
    max_num_seqs: int = 256  # the nodes' --max-num-seqs
    kv_gb_per_s: float = 0.0  # network bandwidth into or out of a node; 0: the measured one


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a role under a load."""

    nodes: int
    lacks: str  # the bottleneck in one word; empty if there is none
    utilisation: float  # share of compute time (prefill) or of token throughput (decode)
    kv_gb_per_s: float = 0.0  # out of or into each node
    ttft: dict[int, float] = {}  # seconds by percentile
    itl: dict[int, float] = {}  # seconds by percentile
    mean_batch: float = 0.0  # decoding sequences per node
    most_batch: int = 0  # largest possible number of decoding sequences per node
    most_by: str = ""  # the limit behind ``most_batch``


class NodeLoad:
    """A workload on nodes with known costs."""

    def __init__(self, costs: Costs, workload: Workload, slo: Slo, limits: LoadLimits) -> None:
        self.costs, self.workload, self.slo, self.limits = costs, workload, slo, limits
        self.network = limits.kv_gb_per_s or costs.kv_gb_per_s
        if not 0.0 <= limits.headroom < 1.0:
            raise ConfigError(f"headroom {limits.headroom:g} is not within 0 … 1; 0.2 keeps a fifth free")

    @cached_property
    def prefill_seconds(self) -> list[float]:
        """Prefill time of each prompt on an idle node."""
        pairs = zip(self.workload.prompts, self.workload.cached, strict=True)
        return [self.costs.prefill(prompt, cached) for prompt, cached in pairs]

    @cached_property
    def prefill_mean(self) -> float:
        return fmean(self.prefill_seconds)

    @cached_property
    def handoff_seconds(self) -> float:
        """Time that a handoff adds to the gap after the first token, for the mean prompt."""
        return self.costs.second_token(self.workload.mean_prompt, self.network)

    def step(self, batch: int) -> float:
        return self.costs.decode(batch, self.workload.mean_context)

    def _chunk(self, batch: int) -> float:
        """Return the seconds that prompts may add to a step of ``batch`` decodes."""
        step = self.step(batch)
        return auto_itl_target(self.step(1), step) - step

    # ------------------------------------------------------------ roles

    def on_prefill(self, rate: float, nodes: int) -> PlannedRole:
        """Model prefill nodes. ``rate`` is in requests per second over all nodes."""
        busy = rate * self.prefill_mean / nodes
        traffic = rate * self.costs.shape.handoff_bytes(self.workload.mean_prompt) / 1e9 / nodes
        share = 1.0 - self.limits.headroom
        if busy > share:
            return PlannedRole(nodes=nodes, lacks="compute", utilisation=busy, kv_gb_per_s=traffic)
        ttft = self._first_tokens(self.prefill_seconds, self.costs.first_token_ms / 1e3, rate, nodes)
        lacks = "network" if traffic > share * self.network else _missed("TTFT", ttft, self.slo.ttft)
        return PlannedRole(nodes=nodes, lacks=lacks, utilisation=busy, kv_gb_per_s=traffic, ttft=ttft)

    def on_decode(self, rate: float, nodes: int) -> PlannedRole:
        """Model decode nodes. Requests still on P hold blocks here, for twice their mean prefill time."""
        traffic = rate * self.costs.shape.handoff_bytes(self.workload.mean_prompt) / 1e9 / nodes
        expected = rate / nodes * 2 * self.prefill_mean
        handoff = [(self.handoff_seconds, 1.0)]
        role = self._decoding(rate / nodes, nodes, expected, self.step, lambda batch: (), handoff)
        if not role.lacks and traffic > (1.0 - self.limits.headroom) * self.network:
            role = msgspec.structs.replace(role, lacks="network")
        return msgspec.structs.replace(role, kv_gb_per_s=traffic)

    def aggregated(self, rate: float, nodes: int) -> PlannedRole:
        """Model nodes that prefill and decode, with the default ITL target: chunks delay all sequences beside them."""
        busy = rate * self.prefill_mean / nodes
        if busy > 1.0 - self.limits.headroom:
            return PlannedRole(nodes=nodes, lacks="compute", utilisation=busy)

        def step(batch: int) -> float:
            return self.step(batch) / (1.0 - busy)

        def with_chunk(batch: int) -> Sequence[tuple[float, float]]:
            chunk = self._chunk(batch)
            return [(chunk, min(0.5, busy / chunk * step(batch)))]

        role = self._decoding(rate / nodes, nodes, 0.0, step, with_chunk, [])
        if role.lacks and not role.itl:
            return role
        seconds = [own * _BESIDE_DECODES for own in self.prefill_seconds]
        busy *= _BESIDE_DECODES
        if busy > 1.0 - self.limits.headroom:
            return msgspec.structs.replace(role, lacks="compute", utilisation=busy)
        ttft = self._first_tokens(seconds, 0.0, rate, nodes)
        lacks = role.lacks or _missed("TTFT", ttft, self.slo.ttft)
        return msgspec.structs.replace(role, ttft=ttft, lacks=lacks, utilisation=max(role.utilisation, busy))

    def elastic(self, rate: float, nodes: int) -> PlannedRole:
        """Model nodes that lean to either role (``pdserve serve``), with the default ITL target."""
        needed = rate * self.prefill_mean / (1.0 - self.limits.headroom)  # nodes that prompts occupy
        if needed >= nodes:
            return PlannedRole(nodes=nodes, lacks="compute", utilisation=rate * self.prefill_mean / nodes)
        for leaning in (ceil(needed), needed):
            if leaning < nodes and not (role := self._leaning(rate, nodes, leaning)).lacks:
                return role
        return self.aggregated(rate, nodes)

    def _leaning(self, rate: float, nodes: int, leaning: float) -> PlannedRole:
        """Model ``nodes`` of which ``leaning`` compute prompts; one does both if that is no whole number."""
        decoding, part = nodes - leaning, leaning % 1.0
        long_gaps = part / AUTO_ITL_STEPS
        share = (1.0 - part) / decoding * long_gaps / (1.0 - part + 2.0 * long_gaps)

        def longer(batch: int) -> Sequence[tuple[float, float]]:
            return [(self._chunk(batch), share)]

        expected, handoff = rate / decoding * 2 * self.prefill_mean, [(self.handoff_seconds, 1.0)]
        role = self._decoding(rate / decoding, nodes, expected, self.step, longer, handoff)
        if role.lacks and not role.itl:
            return role
        ttft = self._first_tokens(self.prefill_seconds, self.costs.first_token_ms / 1e3, rate, ceil(leaning))
        return msgspec.structs.replace(role, ttft=ttft, lacks=role.lacks or _missed("TTFT", ttft, self.slo.ttft))

    def _first_tokens(self, seconds: Sequence[float], exposed: float, rate: float, nodes: int) -> dict[int, float]:
        """Return TTFT percentiles for prompts that take ``seconds``. Waiting prompts share steps."""
        gaps, full = self.workload.gaps, self.costs.prefill(self.costs.step_tokens)
        waited = waits(gaps, seconds, rate, nodes)
        behind = beside(gaps, waited, seconds, rate)
        times = [
            wait + own + exposed + min(others / nodes, max(0.0, full - own))
            for wait, own, others in zip(waited, seconds, behind, strict=True)
        ]
        return {percent: percentile(times, percent) for percent in (*_REPORTED, *self.slo.ttft)}

    # ------------------------------------------------------------ decoding

    def max_batch(self, expected: float) -> tuple[int, str]:
        """Return the largest decode batch of a node with ``expected`` more prompts on P, and the limit behind it."""
        context = max(1.0, self.workload.mean_context)
        by_memory = (self.costs.kv_tokens - expected * self.workload.mean_prompt) / context
        by_flag = self.limits.max_num_seqs - expected
        return (int(by_memory), "KV memory") if by_memory < by_flag else (int(by_flag), "max-num-seqs")

    def _decoding(
        self,
        rate: float,
        nodes: int,
        expected: float,
        step: Callable[[int], float],
        longer: Callable[[int], Sequence[tuple[float, float]]],
        first: Sequence[tuple[float, float]],
    ) -> PlannedRole:
        """Model a node with ``rate`` requests per second.

        A step of n sequences takes ``step(n)`` on average. A gap between tokens is ``self.step(n)``. Some are longer:
        by ``longer(n)`` (seconds, share of gaps) or, after the first token of an output, by ``first``.
        """
        demand = rate * self.workload.mean_decoded
        most, by = self.max_batch(expected)
        if most < 1:
            return PlannedRole(nodes=nodes, lacks=by, utilisation=1.0, most_by=by)
        role = PlannedRole(nodes=nodes, lacks="", utilisation=demand * step(most) / most, most_batch=most, most_by=by)
        if role.utilisation >= 1.0 - self.limits.headroom:
            return msgspec.structs.replace(role, lacks="decode steps" if by == "max-num-seqs" else by)
        shares = occupancy(demand, step, most)
        gaps = list(self._gaps(shares, step, longer, first))
        itl = {percent: weighted_percentile(gaps, percent) for percent in (*_REPORTED, *self.slo.itl)}
        lacks = by if shares[-1] > _FULL else _missed("ITL", itl, self.slo.itl)
        mean = sum(batch * share for batch, share in enumerate(shares))
        return msgspec.structs.replace(role, lacks=lacks, itl=itl, mean_batch=mean)

    def _gaps(
        self,
        shares: Sequence[float],
        step: Callable[[int], float],
        longer: Callable[[int], Sequence[tuple[float, float]]],
        first: Sequence[tuple[float, float]],
    ) -> Iterator[tuple[float, float]]:
        """Yield (seconds, weight) of gaps between tokens, weighted by their number."""
        of_first = 1.0 / max(self.workload.mean_decoded, 1.0) if first else 0.0
        busy = 1.0 - shares[0]
        for batch, share in enumerate(shares):
            if not batch or share < _RARE * busy:
                continue
            weight, usual = share * batch / step(batch), self.step(batch)
            pieces = longer(batch)
            yield usual, weight * (1.0 - of_first) * (1.0 - sum(part for _, part in pieces))
            for seconds, part in pieces:
                yield usual + seconds, weight * (1.0 - of_first) * part
            for seconds, part in first:
                yield seconds + usual * (_JOINING_STEPS if batch > 1 else 1.0), weight * of_first * part


def _missed(what: str, found: dict[int, float], slo: dict[int, float]) -> str:
    return next((f"{what} p{percent}" for percent, most in slo.items() if found[percent] > most), "")
