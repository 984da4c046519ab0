"""Predict a load on a fleet: a virtual fleet serves a sample of its requests.

The first third of the sample fills the fleet, and the last sixth keeps it busy; figures are those of the requests
between. A simulation ends early if so many first tokens are late that a limit is certainly missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from cli.numbers import percentile
from cli.plan.costs import Costs
from cli.plan.workload import Workload
from cli.virtual_fleet.fleet import Simulation
from cli.virtual_fleet.jobs import Job
from cli.virtual_fleet.node import Usage
from pdserve.errors import CapacityError, ConfigError
from pdserve.request_cost import ITL_OBJECTIVE, TTFT_OBJECTIVE

REPORTED = (50, 99)  # percentiles to report beside those of the SLO
_TOKENS = 20_000  # output tokens of a sample per node: some 0.4 s of CPU time
LEAST_REQUESTS = 300  # requests of a sample, at least: half of them are measured
_SLOWER = 3.0  # times as long as alone, from which a fleet counts as overloaded, if that is above the objectives


class Slo(msgspec.Struct, frozen=True):
    """Limits in seconds by percentile."""

    ttft: dict[int, float] = {}
    itl: dict[int, float] = {}


class LoadLimits(msgspec.Struct, frozen=True):
    """Limits of each node, and of the simulation."""

    headroom: float = 0.2  # share of a fleet's capacity kept free for bursts, growth and lost nodes
    max_num_seqs: int = 256  # the nodes' --max-num-seqs
    kv_gb_per_s: float = 0.0  # network bandwidth into or out of a node; 0: the measured one
    requests: int = 0  # requests of a sample; 0: by the number of nodes
    itl_target: float | None = None  # the nodes' --itl-target in seconds; None: automatic
    ttft_target: float = TTFT_OBJECTIVE  # the nodes' --ttft-target in seconds; 0: none


class Layout(NamedTuple):
    """The numbers of nodes of a fleet, by role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode + self.both

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["both"] * self.both

    def __str__(self) -> str:
        if self.both:
            return f"{self.both} elastic"
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet under a load. Usage is a mean over the nodes of a role."""

    layout: Layout
    rate: float  # requests per second
    missed: str  # the first limit that is missed, such as "TTFT p99"; empty if there is none
    ttft: dict[int, float]  # seconds by percentile
    itl: dict[int, float]  # seconds by percentile: gaps between tokens
    prefill_busy: float = 0.0  # share of time in which steps execute on prefill nodes
    decode_busy: float = 0.0  # on the other nodes
    mean_batch: float = 0.0  # sequences in steps of the other nodes, over all time
    read_gb_per_s: float = 0.0  # KV into each of the other nodes
    handoffs: float = 0.0  # per request


class PlannedLoad:
    """A workload for nodes with known costs. Raises CapacityError if a request does not fit into a node."""

    def __init__(
        self,
        costs: Costs,
        workload: Workload,
        slo: Slo,
        limits: LoadLimits,
        draw: Callable[[int], Workload] | None = None,
    ) -> None:
        """``draw`` returns a sample of so many requests of the workload; None: its first ones."""
        self.costs = costs
        self.workload = workload
        self.slo = slo
        self.limits = limits
        self.network = limits.kv_gb_per_s or costs.kv_gb_per_s
        self.draw = draw or workload.first
        if not 0.0 <= limits.headroom < 1.0:
            raise ConfigError(f"headroom {limits.headroom:g} is not within 0 … 1; 0.2 keeps a fifth free")
        longest = max(prompt + output for prompt, output in zip(workload.prompts, workload.outputs, strict=True))
        if longest > costs.kv_tokens:
            raise CapacityError(f"a request has {longest:,} tokens, a node has room for {costs.kv_tokens:,}")

    def sample(self, nodes: int) -> Workload:
        """Return the requests that a simulation of so many nodes serves."""
        count = self.limits.requests or max(LEAST_REQUESTS, int(nodes * _TOKENS / self.workload.mean_output))
        return self.draw(min(count, len(self.workload.prompts)))

    # ------------------------------------------------------------ arithmetic of work

    @property
    def max_batch(self) -> tuple[int, str]:
        """Return the most sequences that decode on a node, and the limit behind that."""
        by_memory = int(self.costs.kv_tokens / max(1.0, self.workload.mean_context))
        by_flag = self.limits.max_num_seqs
        return (max(1, by_memory), "KV memory") if by_memory < by_flag else (by_flag, "max-num-seqs")

    @property
    def prompt_work(self) -> float:
        """Seconds of a node per prompt, on average, if the read of the weights took no time."""
        pairs = zip(self.workload.prompts, self.workload.cached, strict=True)
        seconds = sum(self.costs.prefill(prompt, cached) - self.costs.prompts.base for prompt, cached in pairs)
        return seconds / len(self.workload.prompts)

    @property
    def decode_work(self) -> float:
        """Seconds of a node per output, on average, in its largest batch."""
        batch, _ = self.max_batch
        return self.workload.mean_decoded * self.costs.decode(batch, self.workload.mean_context) / batch

    @property
    def read_work(self) -> float:
        """Seconds of a node's network per handoff, on average."""
        return self.costs.shape.handoff_bytes(self.workload.mean_prompt) / 1e9 / self.network

    # ------------------------------------------------------------ limits

    @property
    def ttft_limits(self) -> dict[int, float]:
        """The SLO; without one, what the router aims at, or several times what the median prompt takes alone."""
        alone = self.costs.prefill(percentile(self.workload.prompts, 50))
        return self.slo.ttft or {50: max(TTFT_OBJECTIVE, _SLOWER * alone)}

    @property
    def itl_limits(self) -> dict[int, float]:
        alone = self.costs.decode(1, self.workload.mean_context)
        return self.slo.itl or {50: max(ITL_OBJECTIVE, _SLOWER * alone)}

    def missed(self, ttft: Mapping[int, float], itl: Mapping[int, float]) -> str:
        """Return the first limit that these percentiles miss; empty if there is none."""
        names = {"TTFT": (ttft, self.ttft_limits), "ITL": (itl, self.itl_limits)}
        misses = (
            f"{name} p{percent}"
            for name, (seconds, limits) in names.items()
            for percent, most in limits.items()
            if seconds[percent] > most
        )
        return next(misses, "")

    def nearness(self, prediction: Prediction) -> float:
        """Return how near a fleet is to its limits: the largest percentile as a share of its limit."""
        pairs = (prediction.ttft, self.ttft_limits), (prediction.itl, self.itl_limits)
        return max(seconds[percent] / most for seconds, limits in pairs for percent, most in limits.items())


def virtual_fleet(costs: Costs, layout: Layout, limits: LoadLimits) -> Simulation:
    return Simulation(
        layout.roles,
        card=costs.card(limits.kv_gb_per_s),
        delays=costs.delays(),
        target=limits.itl_target,
        ttft_target=limits.ttft_target,
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=costs.step_tokens,
    )


def predict(load: PlannedLoad, layout: Layout, rate: float, sample: Workload | None = None) -> Prediction:
    """Return what a fleet does with ``rate`` requests per second; ``sample`` None: that of the load."""
    jobs = (sample or load.sample(layout.nodes)).jobs(rate)
    count = len(jobs)
    measured = jobs[count // 3 : count - count // 6]
    for job in jobs[count - count // 6 :]:
        job.awaited = False
    simulation = virtual_fleet(load.costs, layout, load.limits)
    simulation.run(jobs, partial(_is_late, simulation, measured, load.ttft_limits))
    ttft = _percentiles((job.ttft for job in measured if job.tokens), (*REPORTED, *load.ttft_limits))
    itl = _percentiles(chain.from_iterable(job.gaps for job in measured), (*REPORTED, *load.itl_limits))
    missed = load.missed(ttft, itl)
    if simulation.given_up and not missed.startswith("TTFT"):
        missed = f"TTFT p{min(load.ttft_limits)}"
    begin = int(measured[0].at) + 1
    return Prediction(
        layout=layout,
        rate=rate,
        missed=missed,
        ttft=ttft,
        itl=itl,
        handoffs=simulation.handoffs / count,
        **_usage(load, layout, simulation.usage[begin : int(jobs[-1].at) + 1]),
    )


def _is_late(simulation: Simulation, jobs: Sequence[Job], limits: Mapping[int, float]) -> bool:
    """Return whether so many first tokens are later than a limit that its percentile misses it."""
    now = simulation.now
    waits = [job.ttft if job.tokens else now - job.at for job in jobs]
    return any(
        sum(wait > most for wait in waits) > len(jobs) * (1.0 - percent / 100) for percent, most in limits.items()
    )


def _percentiles(values: Iterable[float], percents: Iterable[int]) -> dict[int, float]:
    ordered = sorted(values) or [0.0]
    return {percent: percentile(ordered, percent) for percent in percents}


def _usage(load: PlannedLoad, layout: Layout, seconds: Sequence[Sequence[Usage]]) -> dict[str, float]:
    """Return the usage of nodes from the first of these seconds to the last one; nothing for less than a second."""
    time = len(seconds) - 1
    if time < 1:
        return {}
    spent = [
        Usage(after.steps - before.steps, after.decodes - before.decodes, after.read_tokens - before.read_tokens)
        for before, after in zip(seconds[0], seconds[-1], strict=True)
    ]
    prefill = spent[: layout.prefill]
    others = spent[layout.prefill :]
    kv_bytes = load.costs.shape.kv_bytes * sum(usage.read_tokens for usage in others)
    return {
        "prefill_busy": sum(usage.steps for usage in prefill) / time / max(1, len(prefill)),
        "decode_busy": sum(usage.steps for usage in others) / time / len(others),
        "mean_batch": sum(usage.decodes for usage in others) / time / len(others),
        "read_gb_per_s": kv_bytes / 1e9 / time / len(others),
    }
