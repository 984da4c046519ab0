"""Elastic fleets in a simulation with the real policy: they lean as the load asks for, and stay there."""

from __future__ import annotations

from itertools import cycle, pairwise

import pytest
from fleet_loads import BURSTS, Figures, poisson, shift

from cli.virtual_fleet.fleet import Simulation, split
from cli.virtual_fleet.jobs import Job
from pdserve.request_cost import LinearCost
from router.fleet.policy import Placement

NEAR = 1.15  # times the result of the best fixed split


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "splits"), [(2, (0, 1)), (8, (0, 1, 6))])
def test_each_burst_is_served_nearly_as_by_the_best_fixed_split(nodes: int, splits: tuple[int, ...]) -> None:
    elastic = shift(["both"] * nodes, 6.0)
    fixed = [shift(split(prefill, nodes), 6.0) for prefill in splits]
    for phase in range(len(BURSTS)):
        burst = elastic.phases[phase]
        assert burst.duration <= NEAR * min(fleet.phases[phase].duration for fleet in fixed)
        assert burst.requests >= max(fleet.phases[phase].requests for fleet in fixed) / NEAR


def leaning(simulation: Simulation, since: int) -> list[set[int]]:
    """Return the nodes that mostly prefill, by second."""
    return [{node for node, share in enumerate(shares) if share > 0.5} for shares in simulation.shares[since:]]


@pytest.mark.slow
@pytest.mark.parametrize("routers", [1, 2])
def test_roles_stay_under_constant_load(routers: int) -> None:
    simulation = Simulation(["both"] * 8, routers=routers)
    jobs = poisson(80.0, 20.0, 2000, 200)
    simulation.run(jobs)
    changes = [len(before ^ after) for before, after in pairwise(leaning(simulation, since=5))]
    assert sum(changes) <= 0.1 * 8 * len(changes)
    assert simulation.moves <= 0.1 * len(jobs)


@pytest.mark.slow
def test_routers_that_do_not_talk_choose_as_well_as_one() -> None:
    results = []
    for routers in (1, 4):
        jobs = poisson(80.0, 10.0, 2000, 200)
        Simulation(["both"] * 8, routers=routers).run(jobs)
        results.append(Figures.of(jobs).duration)
    assert results[1] <= NEAR * results[0]


def test_requests_decode_where_they_were_prefilled_at_low_load() -> None:
    simulation = Simulation(["both"] * 2)
    simulation.run([Job(2.0 * number, 2000, 200) for number in range(20)])
    assert (simulation.handoffs, simulation.moves) == (0, 0)


@pytest.mark.parametrize("output", [40, 44])
def test_long_contexts_after_a_short_stream_do_not_end_a_decode_node(output: int) -> None:
    """Steps of three streams take more than three times as long, so their line has no base."""
    prefills = cycle(("n00", "n01", "n02"))
    simulation = Simulation(["prefill"] * 3 + ["decode"], policy=lambda *_: Placement("n03", next(prefills)))
    simulation.run([Job(0.0, 200, output), *(Job(2.0, 100_000, 60) for _ in range(3))])
    scheduler = simulation.node("n03").scheduler
    assert scheduler.meter.decode.base == pytest.approx(0.0, abs=1e-6)
    costs = scheduler.status().costs
    assert costs.prompt == LinearCost(), "it has computed no prompt"
    assert costs.decode.base > 0.01, "the mean of its steps"


def test_roles_of_all_kinds_serve_a_load_better_than_without_the_elastic_nodes() -> None:
    results = []
    for roles in (["prefill", "decode"], ["prefill", "decode", "both", "both"]):
        jobs = poisson(24.0, 10.0, 2000, 200)
        Simulation(roles).run(jobs)
        results.append(Figures.of(jobs))
    fewer, more = results
    assert more.ttft[50] < 0.7 * fewer.ttft[50]
    assert more.per_token[50] < 0.8 * fewer.per_token[50]
