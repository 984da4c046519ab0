"""Properties of the number of nodes for any load."""

from __future__ import annotations

import msgspec
import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st

from cli.plan.costs import Costs, load_costs
from cli.plan.node_load import LoadLimits, NodeLoad, Slo
from cli.plan.sizing import plan_for_gpus, plan_for_rate
from cli.plan.workload import Workload, workload_of
from pdserve.errors import CapacityError

COSTS = load_costs("h200-llama-8b")
CHAT = workload_of("p50=1500,p99=8000", "p50=250,p99=1000", 0.0, samples=400)
loads = st.floats(0.5, 400.0)


def nodes_for(rate: float, slo: Slo = Slo(), costs: Costs = COSTS, workload: Workload = CHAT) -> tuple[int, int]:  # noqa: B008
    plan = plan_for_rate(NodeLoad(costs, workload, slo, LoadLimits()), rate)
    return plan.prefill.nodes, plan.decode.nodes


def at_least(more: tuple[int, int], less: tuple[int, int]) -> bool:
    return more[0] >= less[0] and more[1] >= less[1]


@examples(25)
@given(loads, st.floats(1.0, 3.0))
def test_more_requests_never_need_fewer_nodes(rate: float, times: float) -> None:
    slo = Slo({99: 1.0}, {99: 0.02})
    assert at_least(nodes_for(rate * times, slo), nodes_for(rate, slo))


@examples(25)
@given(loads, st.floats(0.4, 3.0), st.floats(0.012, 0.1), st.floats(1.0, 4.0))
def test_a_tighter_slo_never_needs_fewer_nodes(rate: float, ttft: float, itl: float, looser: float) -> None:
    tight, loose = Slo({95: ttft}, {90: itl}), Slo({95: looser * ttft}, {90: looser * itl})
    assert at_least(nodes_for(rate, tight), nodes_for(rate, loose))


@examples(15)
@given(loads, st.floats(0.1, 10.0))
def test_slower_nodes_serve_a_lower_rate(rate: float, times: float) -> None:
    slower = msgspec.structs.replace(
        COSTS,
        prefill_ms=tuple((x, times * y) for x, y in COSTS.prefill_ms),
        decode_ms=tuple((x, times * y) for x, y in COSTS.decode_ms),
        second_token_ms=tuple((x, times * y) for x, y in COSTS.second_token_ms),
        context_ns=times * COSTS.context_ns,
        first_token_ms=times * COSTS.first_token_ms,
        kv_gb_per_s=COSTS.kv_gb_per_s / times,
    )
    slo, stretched = Slo({99: 1.0}, {99: 0.02}), Slo({99: times * 1.0}, {99: times * 0.02})
    assert nodes_for(rate / times, stretched, slower) == nodes_for(rate, slo)


def test_large_fleets_are_sized_by_compute_time() -> None:
    """Little's law: busy prefill nodes = arrival rate × prefill time, and the same for sequences."""
    rate, limits = 20_000.0, LoadLimits(headroom=0.2)
    load = NodeLoad(COSTS, CHAT, Slo(), limits)
    plan = plan_for_rate(load, rate)
    assert plan.prefill.nodes == pytest.approx(rate * load.prefill_mean / 0.8, rel=0.01)
    at_once = rate * CHAT.mean_decoded * load.step(round(plan.decode.mean_batch))
    assert plan.decode.nodes * plan.decode.mean_batch == pytest.approx(at_once, rel=0.02)


def test_found_number_suffices_and_one_fewer_does_not() -> None:
    load = NodeLoad(COSTS, CHAT, Slo({99: 0.5}, {99: 0.015}), LoadLimits())
    plan = plan_for_rate(load, 150.0)
    assert (plan.prefill.lacks, plan.decode.lacks) == ("", "")
    assert load.on_prefill(150.0, plan.prefill.nodes - 1).lacks == plan.prefill_needs != ""
    assert load.on_decode(150.0, plan.decode.nodes - 1).lacks == plan.decode_needs != ""
    assert plan.prefill_carries >= 150.0
    assert plan.decode_carries >= 150.0


def test_rate_for_gpus_needs_no_more_gpus() -> None:
    load = NodeLoad(COSTS, CHAT, Slo({99: 1.0}, {99: 0.02}), LoadLimits())
    plan = plan_for_gpus(load, 12)
    assert plan.nodes <= 12
    assert plan_for_rate(load, 1.1 * plan.rate).nodes > 12


def test_itl_tail_slo_favours_disaggregation() -> None:
    prompts = workload_of("8192", "200", 0.0, samples=400)
    tight = plan_for_rate(NodeLoad(COSTS, prompts, Slo(itl={99: 0.02}), LoadLimits()), 10.0)
    assert tight.aggregated is None or tight.aggregated.nodes > tight.nodes
    short = workload_of("64", "200", 0.0, samples=400)
    either = plan_for_rate(NodeLoad(COSTS, short, Slo(itl={99: 0.04}), LoadLimits()), 10.0)
    assert either.aggregated is not None
    assert either.aggregated.nodes == 1


def test_a_slow_network_needs_more_nodes() -> None:
    fast, slow = (
        plan_for_rate(NodeLoad(COSTS, CHAT, Slo(), LoadLimits(kv_gb_per_s=each)), 40.0) for each in (100.0, 1.25)
    )
    assert slow.prefill_needs == slow.decode_needs == "network"
    assert slow.nodes > fast.nodes


def test_little_kv_memory_needs_more_decode_nodes() -> None:
    small = msgspec.structs.replace(COSTS, kv_tokens=50_000)
    plan = plan_for_rate(NodeLoad(small, CHAT, Slo(), LoadLimits()), 40.0)
    assert (plan.decode.most_by, plan.decode_needs) == ("KV memory", "KV memory")
    assert plan.decode.nodes > nodes_for(40.0)[1]


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (
            Slo(ttft={99: 0.1}),
            "no number of prefill nodes suffices: with 16384 the bottleneck is TTFT p99; when idle, TTFT p50 is",
        ),
        (
            Slo(itl={50: 0.003}),
            "no number of decode nodes suffices: with 16384 the bottleneck is ITL p50; when idle, ITL p50 is 4 ms",
        ),
    ],
)
def test_load_that_no_number_of_nodes_can_serve_is_refused(slo: Slo, message: str) -> None:
    load = NodeLoad(COSTS, CHAT, slo, LoadLimits())
    with pytest.raises(CapacityError, match=message):
        plan_for_rate(load, 10.0)
    with pytest.raises(CapacityError, match=message):
        plan_for_gpus(load, 8)


def test_one_gpu_is_too_few_for_both_roles() -> None:
    with pytest.raises(CapacityError, match=r"^1 GPU is 1 node; a prefill and a decode node need 2 GPUs"):
        plan_for_gpus(NodeLoad(COSTS, CHAT, Slo(), LoadLimits()), 1)


@examples(20)
@given(loads)
def test_elastic_nodes_take_no_more_than_the_better_of_both(rate: float) -> None:
    plan = plan_for_rate(NodeLoad(COSTS, CHAT, Slo({99: 1.0}, {99: 0.05}), LoadLimits()), rate)
    assert plan.elastic is not None
    others = [plan.nodes, *([] if plan.aggregated is None else [plan.aggregated.nodes])]
    assert plan.elastic.nodes <= min(others)
