"""Predicted costs of prompts beside the steps that simulated nodes execute."""

from __future__ import annotations

import pytest
from simulated_node import H100

from pdserve.config.simulated_costs import StepTokens
from pdserve.request_cost import DELAY_WEIGHT, LinearCost, RequestLoad, StepCosts, prompt_cost

COSTS = StepCosts(  # the lines of steps of H100 that hide as many seconds as they can
    prompt=LinearCost(H100.step - H100.hidden, H100.prompt_token),
    decode=LinearCost(H100.step, H100.decode),
)
STREAMS = 20
DECODE = H100.seconds(StepTokens(STREAMS))


def mixed(tokens: int) -> float:
    """Return the seconds of a step with the streams and so many prompt tokens."""
    return H100.seconds(StepTokens(STREAMS, prompt_tokens=tokens))


def load(backlog: int = 0) -> RequestLoad:
    return RequestLoad(requests=STREAMS, decoding=STREAMS, backlog=backlog, itl_target=0.05)


@pytest.mark.parametrize("tokens", [800, 1900])
def test_prompt_beside_streams_costs_what_it_adds_to_a_step_that_reads_the_weights_anyway(tokens: int) -> None:
    expected = DECODE / 2 + mixed(tokens) + DELAY_WEIGHT * STREAMS * (mixed(tokens) - DECODE)
    assert prompt_cost(load(), COSTS, tokens) == pytest.approx(expected)


def test_prompt_of_several_steps_pays_the_decodes_of_each() -> None:
    most = int((0.05 - DECODE + H100.hidden) / H100.prompt_token)  # tokens in a step
    seconds = 2 * mixed(most)
    expected = DECODE / 2 + seconds + DELAY_WEIGHT * STREAMS * (seconds - 2 * DECODE)
    assert prompt_cost(load(), COSTS, 2 * most) == pytest.approx(expected, rel=1e-3)


def test_prompt_waits_for_half_of_the_executing_step_and_for_the_queue_behind_it() -> None:
    most = int((0.05 - DECODE + H100.hidden) / H100.prompt_token)
    waits = [prompt_cost(load(backlog), COSTS, 800) - prompt_cost(load(), COSTS, 800) for backlog in (most, 2 * most)]
    assert waits[0] == pytest.approx((mixed(most) - DECODE) / 2, rel=1e-3)
    assert waits[1] > waits[0] + 0.9 * (0.05 - DECODE)


def test_idle_node_begins_a_prompt_at_once() -> None:
    assert prompt_cost(RequestLoad(), COSTS, 800) == pytest.approx(H100.seconds(StepTokens(prompt_tokens=800)))
