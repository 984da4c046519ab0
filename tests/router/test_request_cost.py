"""Predicted costs: prompts beside the steps that simulated nodes execute, and pulls over slow and fast links."""

from __future__ import annotations

import pytest

from cli.virtual_fleet.cards import H100_COSTS
from pdserve.config.simulated_costs import StepTokens
from pdserve.request_cost import (
    DELAY_WEIGHT,
    LinearCost,
    LoadPlan,
    Pace,
    RequestLoad,
    StepCosts,
    plan_pull,
    plan_split,
    prompt_cost,
    pull_seconds,
)

COSTS = StepCosts(  # the lines of steps of H100 that hide as many seconds as they can
    prompt=LinearCost(H100_COSTS.step - H100_COSTS.hidden, H100_COSTS.prompt_token),
    decode=LinearCost(H100_COSTS.step, H100_COSTS.decode),
)
STREAMS = 20
DECODE = H100_COSTS.seconds(StepTokens(STREAMS))


def mixed(tokens: int) -> float:
    """Return the seconds of a step with all streams and ``tokens`` prompt tokens."""
    return H100_COSTS.seconds(StepTokens(STREAMS, prompt_tokens=tokens))


def load(backlog: int = 0) -> RequestLoad:
    return RequestLoad(requests=STREAMS, decoding=STREAMS, backlog=backlog, itl_target=0.05)


@pytest.mark.parametrize("tokens", [800, 1900])
def test_prompt_beside_streams_costs_what_it_adds_to_a_step_that_reads_the_weights_anyway(tokens: int) -> None:
    expected = DECODE / 2 + mixed(tokens) + DELAY_WEIGHT * STREAMS * (mixed(tokens) - DECODE)
    assert prompt_cost(load(), COSTS, tokens) == pytest.approx(expected)


def test_prompt_of_several_steps_pays_the_decodes_of_each() -> None:
    most = int((0.05 - DECODE + H100_COSTS.hidden) / H100_COSTS.prompt_token)  # tokens in a step
    seconds = 2 * mixed(most)
    expected = DECODE / 2 + seconds + DELAY_WEIGHT * STREAMS * (seconds - 2 * DECODE)
    assert prompt_cost(load(), COSTS, 2 * most) == pytest.approx(expected, rel=1e-3)


def test_prompt_waits_for_half_of_the_executing_step_and_for_the_queue_behind_it() -> None:
    most = int((0.05 - DECODE + H100_COSTS.hidden) / H100_COSTS.prompt_token)
    waits = [prompt_cost(load(backlog), COSTS, 800) - prompt_cost(load(), COSTS, 800) for backlog in (most, 2 * most)]
    assert waits[0] == pytest.approx((mixed(most) - DECODE) / 2, rel=1e-3)
    assert waits[1] > waits[0] + 0.9 * (0.05 - DECODE)


def test_idle_node_begins_a_prompt_at_once() -> None:
    assert prompt_cost(RequestLoad(), COSTS, 800) == pytest.approx(H100_COSTS.seconds(StepTokens(prompt_tokens=800)))


# ------------------------------------------------------------ pulls of an 8B model: 131,072 bytes per token

COMPUTE = 40e-6  # seconds per token
TOKENS = 20_000
BLOCK = 16


def over(gbits: float) -> StepCosts:
    """Return the costs of a node with a link of ``gbits`` Gbit/s."""
    return StepCosts(prompt=LinearCost(1e-3, COMPUTE), read=LinearCost(1e-3, 131_072 * 8 / (gbits * 1e9)))


@pytest.mark.parametrize(
    ("gbits", "share"), [(1, None), (5, None), (12, 0.70), (25, 0.52), (40, 0.40)], ids=lambda value: f"{value}"
)
def test_pull_is_split_where_it_takes_about_as_long_as_to_compute(gbits: float, share: float | None) -> None:
    """``share`` is that of the time to compute all tokens."""
    costs = over(gbits)
    plan = plan_pull(costs, TOKENS, split_block=BLOCK)
    assert (plan is None) == (share is None)
    if plan is not None and share is not None:
        assert plan.seconds == pytest.approx(share * COMPUTE * TOKENS, rel=0.02)
        assert plan.seconds < 0.75 * min(COMPUTE * TOKENS, pull_seconds(costs, TOKENS))
        assert COMPUTE * plan.computed == pytest.approx(pull_seconds(costs, plan.loaded), rel=0.01)
        assert plan.computed + plan.loaded == TOKENS
        assert plan.computed % BLOCK == 0


@pytest.mark.parametrize("gbits", [100, 400, 2000])
def test_all_is_pulled_over_a_fast_link(gbits: float) -> None:
    costs = over(gbits)
    assert plan_pull(costs, TOKENS, split_block=BLOCK) == LoadPlan(0, TOKENS, pull_seconds(costs, TOKENS))


def test_busy_node_computes_less_of_a_pull() -> None:
    alone, busy = (plan_pull(over(25), TOKENS, split_block=BLOCK, pace=Pace(queued)) for queued in (0.0, 0.1))
    assert alone is not None
    assert busy is not None
    assert 0 < busy.computed < alone.computed
    assert 0.1 + COMPUTE * busy.computed == pytest.approx(pull_seconds(over(25), busy.loaded), rel=0.01)
    waiting = plan_pull(over(25), TOKENS, split_block=BLOCK, pace=Pace(1.0))
    assert waiting == LoadPlan(0, TOKENS, pull_seconds(over(25), TOKENS)), "all of it comes before the node is free"


def test_node_that_decodes_computes_less_of_a_pull() -> None:
    plan = plan_pull(over(25), TOKENS, split_block=BLOCK, pace=Pace(slower=2.0))
    assert plan is not None
    assert 2.0 * COMPUTE * plan.computed == pytest.approx(pull_seconds(over(25), plan.loaded), rel=0.01)


def test_node_that_cannot_split_pulls_all_or_nothing() -> None:
    assert plan_pull(over(25), TOKENS) is None
    assert plan_pull(over(40), TOKENS) == LoadPlan(0, TOKENS, pull_seconds(over(40), TOKENS))


@pytest.mark.parametrize("costs", [StepCosts(), StepCosts(prompt=LinearCost(1e-3, COMPUTE))])
def test_unmeasured_pull_is_tried_whole(costs: StepCosts) -> None:
    plan = plan_pull(costs, TOKENS, split_block=BLOCK)
    assert plan is not None
    assert (plan.computed, plan.loaded) == (0, TOKENS)


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_short_prefixes_are_not_split(num_tokens: int) -> None:
    """A round trip takes longer than to compute them."""
    assert plan_pull(over(25), num_tokens, split_block=BLOCK) is None


def test_split_pulls_at_least_a_token() -> None:
    costs = StepCosts(prompt=LinearCost(1e-3, 1.0), read=LinearCost(0.5, 1.0))
    for num_tokens in range(1, 100):
        plan = plan_pull(costs, num_tokens, split_block=BLOCK)
        assert plan is None or (plan.loaded >= 1 and plan.computed % BLOCK == 0)


@pytest.mark.parametrize(
    ("speed", "share"),
    [(1.2, None), (2, 0.66), (4, 0.50), (7, 0.36), (25, None), (54, None)],
    ids=lambda value: f"{value}",
)
def test_read_from_disk_is_split_where_it_takes_about_as_long_as_to_compute(speed: float, share: float | None) -> None:
    """``speed`` in GB/s, of a disk or host memory; ``share`` is that of the time to compute all tokens."""
    compute = 1 / 30_000
    load = LinearCost(0.0, 131_072 / (speed * 1e9))
    plan = plan_split(load, TOKENS, compute=compute, pace=Pace(), block=BLOCK)
    assert (plan is None) == (share is None)
    if plan is not None:
        assert plan.seconds == pytest.approx((share or 0.0) * compute * TOKENS, rel=0.02)
