"""What a number of nodes make of a load: how busy they are, how long tokens take, and what they lack, if anything.

A role's nodes are looked at by themselves: prompts reach decode nodes as they arrive, however long they were on P.
``aggregated`` nodes do both, which is what decode nodes do without prefill nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import ceil
from statistics import fmean

import msgspec

from pdserve.errors import ConfigError
from pdserve.plan.costs import Costs
from pdserve.plan.queues import beside, occupancy, percentile, waits, weighted_percentile
from pdserve.plan.workload import Workload

_FULL = 0.01  # share of time in which a decode node may be full: who comes then waits for a place there
_RARE = 1e-7  # share of the busy time in which a number of sequences is not worth looking at
_LENGTHS = 32  # quantiles of the prompts that stand for all where steps are computed

#: Steps until a sequence that joins others has its token: of two in flight one is half over, and then its own.
_JOINING = 2.5

#: Percentiles that are told of beside those of the SLO.
_TOLD = (50, 99)


class Slo(msgspec.Struct, frozen=True):
    """Most seconds, by percentile."""

    ttft: dict[int, float] = {}
    itl: dict[int, float] = {}


class LoadLimits(msgspec.Struct, frozen=True):
    """``headroom`` is the share of its work that no node is to be given: for bursts, growth, a lost node."""

    headroom: float = 0.2
    max_num_seqs: int = 256  # as nodes are started with
    kv_gb_per_s: float = 0.0  # of the network, into or out of a node; 0: as it was measured


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a role under a load. ``lacks`` says in a word what there is too little of; nothing: ""."""

    nodes: int
    lacks: str
    utilisation: float  # of the time, or of the tokens, that they could do
    kv_gb_per_s: float = 0.0  # out of or into each
    ttft: dict[int, float] = {}  # percentiles, seconds
    itl: dict[int, float] = {}
    mean_batch: float = 0.0  # sequences that decode on each, on average
    most_batch: int = 0  # … and at most
    most_by: str = ""  # what sets that


class NodeLoad:
    """A workload at a rate, on nodes of some costs: what nodes of either role are asked for."""

    def __init__(self, costs: Costs, workload: Workload, slo: Slo, limits: LoadLimits) -> None:
        self.costs, self.workload, self.slo, self.limits = costs, workload, slo, limits
        self.network = limits.kv_gb_per_s or costs.kv_gb_per_s
        if not 0.0 <= limits.headroom < 1.0:
            raise ConfigError(f"headroom {limits.headroom:g} is not within 0 … 1; 0.2 leaves a fifth")

    @cached_property
    def prefill_seconds(self) -> list[float]:
        """Of each request's prompt, on an idle node."""
        pairs = zip(self.workload.prompts, self.workload.cached, strict=True)
        return [self.costs.prefill(prompt, cached) for prompt, cached in pairs]

    @cached_property
    def prefill_mean(self) -> float:
        return fmean(self.prefill_seconds)

    @cached_property
    def pieces(self) -> list[int]:
        """Steps of each prompt."""
        pairs = zip(self.workload.prompts, self.workload.cached, strict=True)
        return [ceil((prompt - cached) / self.costs.step_tokens) for prompt, cached in pairs]

    @cached_property
    def piece_seconds(self) -> list[float]:
        """Quantiles of how long a step's part of a prompt takes."""
        parts = sorted(s / n for s, n in zip(self.prefill_seconds, self.pieces, strict=True) for _ in range(n))
        return [parts[len(parts) * (2 * index + 1) // (2 * _LENGTHS)] for index in range(_LENGTHS)]

    @cached_property
    def handoff_seconds(self) -> float:
        """That the gap behind a first token is longer, for the mean prompt."""
        return self.costs.second_token(self.workload.mean_prompt, self.network)

    def step(self, batch: int) -> float:
        """Seconds of a step in which so many sequences decode."""
        return self.costs.decode(batch, self.workload.mean_context)

    # ------------------------------------------------------------ roles

    def on_prefill(self, rate: float, nodes: int) -> PlannedRole:
        """``rate`` is in requests per second, of all nodes together."""
        busy = rate * self.prefill_mean / nodes
        traffic = rate * self.workload.mean_prompt * self.costs.shape.kv_bytes / 1e9 / nodes
        share = 1.0 - self.limits.headroom
        if busy > share:
            return PlannedRole(nodes=nodes, lacks="compute", utilisation=busy, kv_gb_per_s=traffic)
        ttft = self._first_tokens(self.prefill_seconds, self.costs.first_token_ms / 1e3, rate, nodes)
        lacks = "network" if traffic > share * self.network else _missed("TTFT", ttft, self.slo.ttft)
        return PlannedRole(nodes=nodes, lacks=lacks, utilisation=busy, kv_gb_per_s=traffic, ttft=ttft)

    def on_decode(self, rate: float, nodes: int) -> PlannedRole:
        """A place is also taken by who is on P still: as if each prompt waited there as long as it takes."""
        traffic = rate * self.workload.mean_prompt * self.costs.shape.kv_bytes / 1e9 / nodes
        expected = rate / nodes * 2 * self.prefill_mean
        handoff = [(self.handoff_seconds, 1.0)]
        role = self._decoding(rate / nodes, nodes, expected, self.step, lambda batch: (), handoff)
        if not role.lacks and traffic > (1.0 - self.limits.headroom) * self.network:
            role = msgspec.structs.replace(role, lacks="network")
        return msgspec.structs.replace(role, kv_gb_per_s=traffic)

    def aggregated(self, rate: float, nodes: int) -> PlannedRole:
        """A step in which a prompt is computed takes so much longer for all that decode there, and the prompt too."""
        busy = rate * self.prefill_mean / nodes
        if busy > 1.0 - self.limits.headroom:
            return PlannedRole(nodes=nodes, lacks="compute", utilisation=busy)
        pieces = rate / nodes * fmean(self.pieces)  # per second

        def step(batch: int) -> float:
            return self.step(batch) / (1.0 - busy)

        def with_piece(batch: int) -> Sequence[tuple[float, float]]:
            share = min(1.0, pieces * step(batch)) / _LENGTHS
            return [(seconds, share) for seconds in self.piece_seconds]

        role = self._decoding(rate / nodes, nodes, 0.0, step, with_piece, [])
        if role.lacks and not role.itl:
            return role
        shared = self.step(round(role.mean_batch))
        seconds = [own + shared * n for own, n in zip(self.prefill_seconds, self.pieces, strict=True)]
        busy = rate * fmean(seconds) / nodes
        if busy > 1.0 - self.limits.headroom:
            return msgspec.structs.replace(role, lacks="compute", utilisation=busy)
        ttft = self._first_tokens(seconds, 0.0, rate, nodes)
        lacks = role.lacks or _missed("TTFT", ttft, self.slo.ttft)
        return msgspec.structs.replace(role, ttft=ttft, lacks=lacks, utilisation=max(role.utilisation, busy))

    def _first_tokens(self, seconds: Sequence[float], exposed: float, rate: float, nodes: int) -> dict[int, float]:
        """Percentiles of TTFT, where prompts take ``seconds``. What waits shares steps, and is done together."""
        gaps, full = self.workload.gaps, self.costs.prefill(self.costs.step_tokens)
        waited = waits(gaps, seconds, rate, nodes)
        behind = beside(gaps, waited, seconds, rate)
        times = [
            wait + own + exposed + min(others / nodes, max(0.0, full - own))
            for wait, own, others in zip(waited, seconds, behind, strict=True)
        ]
        return {percent: percentile(times, percent) for percent in (*_TOLD, *self.slo.ttft)}

    # ------------------------------------------------------------ decoding

    def places(self, expected: float) -> tuple[int, str]:
        """How many sequences may decode on a node, beside ``expected`` prompts still elsewhere; what sets it."""
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
        """Of a node with ``rate`` requests a second.

        A step of n sequences takes ``step(n)`` on average. Gaps between tokens are ``self.step(n)``, some are longer:
        ``longer(n)`` are (by how many seconds, share of gaps), ``first`` those behind the first token of an output.
        """
        demand = rate * self.workload.mean_decoded
        most, by = self.places(expected)
        if most < 1:
            return PlannedRole(nodes=nodes, lacks=by, utilisation=1.0, most_by=by)
        role = PlannedRole(nodes=nodes, lacks="", utilisation=demand * step(most) / most, most_batch=most, most_by=by)
        if role.utilisation >= 1.0 - self.limits.headroom:
            return msgspec.structs.replace(role, lacks="decode steps" if by == "max-num-seqs" else by)
        shares = occupancy(demand, step, most)
        gaps = list(self._gaps(shares, step, longer, first))
        itl = {percent: weighted_percentile(gaps, percent) for percent in (*_TOLD, *self.slo.itl)}
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
        """(seconds, weight) of gaps between tokens, each weighted by how many tokens are drawn so."""
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
                yield seconds + usual * (_JOINING if batch > 1 else 1.0), weight * of_first * part


def _missed(what: str, found: dict[int, float], slo: dict[int, float]) -> str:
    return next((f"{what} p{percent}" for percent, most in slo.items() if found[percent] > most), "")
