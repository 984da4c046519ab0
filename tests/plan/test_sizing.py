"""Fleets for a load: the fewest nodes that keep the limits in a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from cli.plan.costs import Costs, load_costs
from cli.plan.prediction import Layout, LoadLimits, PlannedLoad, Slo, predict
from cli.plan.predictor import Predictor
from cli.plan.sizing import MOST_SIMULATED, Plan, plan_for_gpus, plan_for_rate
from cli.plan.workload import workload_of
from pdserve.errors import CapacityError, ConfigError

COSTS = load_costs("h200-llama-8b")
CHAT = partial(workload_of, "p50=1500,p99=8000", "8", 0.0)  # few tokens of output: simulations are short


def planned(
    slo: Slo = Slo(),  # noqa: B008
    costs: Costs = COSTS,
    limits: LoadLimits = LoadLimits(requests=300),  # noqa: B008
) -> PlannedLoad:
    return PlannedLoad(costs, CHAT(400), slo, limits, CHAT)


@pytest.fixture(scope="module")
def predictor() -> Iterator[Predictor]:
    with Predictor(planned(), workers=1) as one:
        yield one


def sufficient(plan: Plan) -> bool:
    fleets = [plan.split, plan.aggregated, plan.elastic]
    return all(fleet is not None and not fleet.prediction.missed for fleet in fleets)


def test_predictions_follow_from_the_load_alone() -> None:
    first, second = (predict(planned(), Layout(1, 2), 30.0) for _ in range(2))
    assert first == second
    assert first.missed == ""
    assert 0.0 < first.ttft[50] < first.ttft[99]
    assert 0.0 < first.prefill_busy < 1.0


@pytest.mark.slow
def test_processes_change_no_prediction() -> None:
    layouts = [Layout(1, 1), Layout(decode=2), Layout(both=2)]
    with Predictor(planned(), workers=2) as several:
        assert several.predict(layouts, 20.0) == {layout: predict(planned(), layout, 20.0) for layout in layouts}


def test_an_overloaded_fleet_misses_its_limit() -> None:
    """A node computes 24 such prompts per second."""
    assert predict(planned(), Layout(decode=1), 60.0).missed == "TTFT p50"


def test_fleets_suffice_and_one_node_fewer_does_not(predictor: Predictor) -> None:
    plan = plan_for_rate(predictor, 40.0)
    assert sufficient(plan)
    assert plan.split.layout.prefill >= 2, "a node computes at most 24 such prompts per second"
    assert plan.prefill_needs
    assert plan.aggregated is not None
    fewer = Layout(decode=plan.aggregated.layout.nodes - 1)
    assert predictor.predict([fewer], 50.0)[fewer].missed


@pytest.mark.slow
def test_rate_for_gpus_leaves_the_headroom(predictor: Predictor) -> None:
    plan = plan_for_gpus(predictor, 3)
    assert plan.nodes == 3
    assert sufficient(plan)
    assert not predictor.predict([plan.split.layout], plan.rate / 0.8)[plan.split.layout].missed


@pytest.mark.slow
def test_large_fleets_are_several_simulated_ones(predictor: Predictor) -> None:
    small = plan_for_gpus(predictor, MOST_SIMULATED)
    large = plan_for_gpus(predictor, 100 * MOST_SIMULATED)
    assert large.rate == pytest.approx(100 * small.rate)
    assert large.nodes == 100 * small.nodes
    assert large.split.prediction.layout == small.split.prediction.layout
    assert large.split.prediction.ttft == pytest.approx(small.split.prediction.ttft)
    again = plan_for_rate(predictor, large.rate)
    assert again.split.layout == large.split.layout
    odd = plan_for_gpus(predictor, MOST_SIMULATED + 1)
    assert odd.nodes == MOST_SIMULATED + 1


def test_cached_prompts_need_fewer_nodes() -> None:
    cached = partial(workload_of, "4000", "4", 0.9)
    load = PlannedLoad(COSTS, cached(300), Slo(), LoadLimits(requests=300), cached)
    hit = predict(load, Layout(decode=1), 30.0)
    missed = predict(load, Layout(decode=1), 30.0, workload_of("4000", "4", 0.0, 300))
    assert not hit.missed
    assert missed.missed == "TTFT p50"


@pytest.mark.slow
def test_with_a_slow_network_decode_nodes_compute_more_prompts(predictor: Predictor) -> None:
    with Predictor(planned(limits=LoadLimits(kv_gb_per_s=1.0, requests=300)), workers=1) as slow:
        plan = plan_for_rate(slow, 9.5)
    assert "network" in (plan.prefill_needs, plan.decode_needs)
    assert plan.split.prediction.handoffs < plan_for_rate(predictor, 9.5).split.prediction.handoffs


def test_little_kv_memory_bounds_the_batch() -> None:
    small = msgspec.structs.replace(COSTS, kv_tokens=50_000)
    batch, limit = planned(costs=small).max_batch
    assert limit == "KV memory"
    assert batch < 50
    with pytest.raises(CapacityError, match=r"a request has [\d,]+ tokens, a node has room for 4,000"):
        planned(costs=msgspec.structs.replace(COSTS, kv_tokens=4_000))


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (Slo(ttft={99: 0.1}), "no number of nodes suffices: idle ones miss TTFT p99, TTFT p50 is"),
        (Slo(itl={50: 0.003}), "no number of nodes suffices: idle ones miss ITL p50, TTFT p50 is"),
    ],
)
def test_slo_that_idle_nodes_miss_is_refused(slo: Slo, message: str) -> None:
    with Predictor(planned(slo), workers=1) as predictor:
        with pytest.raises(CapacityError, match=message):
            plan_for_rate(predictor, 10.0)
        with pytest.raises(CapacityError, match=message):
            plan_for_gpus(predictor, 8)


def test_one_gpu_is_too_few_for_both_roles(predictor: Predictor) -> None:
    with pytest.raises(CapacityError, match=r"^1 GPU is 1 node; a prefill and a decode node need 2 GPUs"):
        plan_for_gpus(predictor, 1)


def test_headroom_of_all_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="headroom 1 is not within"):
        planned(limits=LoadLimits(headroom=1.0))
