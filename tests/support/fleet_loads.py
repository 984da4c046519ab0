"""Loads for virtual fleets, and their figures."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from cli.numbers import percentile
from cli.virtual_fleet.fleet import Simulation
from cli.virtual_fleet.jobs import Job


def poisson(
    rate: float, seconds: float, prompt: float, output: float, seed: int = 1, start: float = 0.0, sigma: float = 0.8
) -> list[Job]:
    """Return Poisson arrivals with lognormal lengths of these means, at most 12,000 and 1,000 tokens."""
    rng = random.Random(seed)
    at = start
    jobs = list[Job]()

    def length(mean: float, most: int) -> int:
        return min(most, max(16, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    while (at := at + rng.expovariate(rate)) < start + seconds:
        jobs.append(Job(at, length(prompt, 12_000), length(output, 1_000)))
    return jobs


@dataclass(frozen=True)
class Figures:
    """Results of jobs: seconds by percentile, the mean duration, and throughput."""

    ttft: dict[int, float]
    per_token: dict[int, float]
    longest_gap: dict[int, float]
    duration: float
    requests: float
    tokens: float

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Figures:
        decoded = [job for job in jobs if job.output > 1]

        def shares(values: Sequence[float]) -> dict[int, float]:
            return {share: percentile(values, share) for share in (50, 90, 99)}

        seconds = max(job.end for job in jobs) - jobs[0].at
        return cls(
            shares([job.ttft for job in jobs]),
            shares([job.per_token for job in decoded]),
            shares([job.longest_gap for job in decoded]),
            fmean(job.end - job.at for job in jobs),
            len(jobs) / seconds,
            sum(job.output for job in jobs) / seconds,
        )


# ---------------------------------------------------------------- two bursts


class Burst(NamedTuple):
    """A load per node; lengths are means in tokens."""

    name: str
    rate: float  # requests per second
    prompt: int
    output: int


BURSTS = (Burst("prompts", 6.0, 4000, 30), Burst("decodes", 25.0, 250, 400))


class Shift(NamedTuple):
    """Results of a fleet: of each burst, and the simulation."""

    phases: tuple[Figures, ...]
    simulation: Simulation


def shift(roles: Sequence[str], seconds: float, routers: int = 1) -> Shift:
    """Simulate one burst after the other, each for that time."""
    starts = [number * seconds for number in range(len(BURSTS))]
    phases = [
        poisson(burst.rate * len(roles), seconds, burst.prompt, burst.output, seed, start)
        for seed, (burst, start) in enumerate(zip(BURSTS, starts, strict=True))
    ]
    simulation = Simulation(roles, routers=routers)
    simulation.run([job for phase in phases for job in phase])
    return Shift(tuple(map(Figures.of, phases)), simulation)
