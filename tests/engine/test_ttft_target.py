"""Prompts by their objective: how long steps are for it, in which order prompts are computed, and that none starves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_itl_target import DECODE, Model, add_prompts, node_with_streams, run_until

from cli.virtual_fleet.cards import H100
from cli.virtual_fleet.fleet import Simulation, no_moves
from cli.virtual_fleet.jobs import Job
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.request_cost import AUTO_ITL_STEPS, ITL_LIMIT
from pdserve.step_pacing import MOST_STRETCH, Due, StepPace, longest_paced, needed_step, pace, useful_step
from router.fleet.policy import round_robin

DUES = st.lists(st.builds(Due, seconds=st.floats(1e-4, 0.4), left=st.floats(-1.0, 0.5)), min_size=1, max_size=24)
DECODES = st.floats(1e-3, 0.03)
AHEAD = st.sampled_from([0.0, 0.05])
LIMIT = 0.052


def paced(dues: list[Due], decode: float, ahead: float = 0.0) -> StepPace:
    return pace(dues, ahead=ahead, decode=decode, target=max(0.036, 2 * decode), limit=LIMIT)


@given(dues=DUES, decode=DECODES, ahead=AHEAD)
def test_each_prompt_has_one_place_and_late_ones_are_in_order_of_arrival(
    dues: list[Due], decode: float, ahead: float
) -> None:
    chosen = paced(dues, decode, ahead)
    assert sorted(chosen.first + chosen.late) == list(range(len(dues)))
    assert list(chosen.late) == sorted(chosen.late)


@given(dues=DUES, decode=DECODES, ahead=AHEAD, later=st.floats(0.0, 0.5))
def test_steps_are_within_their_bounds_and_not_shorter_with_less_time_left(
    dues: list[Due], decode: float, ahead: float, later: float
) -> None:
    chosen = paced(dues, decode, ahead)
    target = max(0.036, 2 * decode)
    longest = max(target, useful_step([due.seconds for due in dues], ahead, decode))
    assert target <= chosen.seconds <= min(longest, MOST_STRETCH * max(target, LIMIT))
    with_less = paced([Due(due.seconds, due.left - later) for due in dues], decode, ahead)
    assert with_less.seconds >= chosen.seconds * (1 - 1e-9) or with_less.late


@given(dues=DUES, decode=DECODES)
def test_steps_are_useful_between_target_and_limit_while_no_prompt_is_late(dues: list[Due], decode: float) -> None:
    target = max(0.036, 2 * decode)
    patient = [Due(due.seconds, 2.01 * sum(other.seconds for other in dues)) for due in dues]
    chosen = paced(patient, decode)  # prompts take twice their time at most
    useful = useful_step([due.seconds for due in dues], 0.0, decode)
    assert chosen.seconds == min(max(useful, target), max(LIMIT, target))
    assert not chosen.late


@given(dues=DUES, decode=DECODES, ahead=AHEAD)
def test_prompts_in_order_meet_their_objective_in_steps_of_these_seconds(
    dues: list[Due], decode: float, ahead: float
) -> None:
    chosen = paced(dues, decode, ahead)
    end = ahead
    for index in chosen.first:
        end += dues[index].seconds
        assert end * chosen.seconds / (chosen.seconds - decode) <= dues[index].left * (1 + 1e-6)


@given(dues=DUES, decode=DECODES)
def test_no_other_choice_meets_more_objectives(dues: list[Due], decode: float) -> None:
    """Against every set of up to six prompts, at the rate of the longest steps."""
    dues = dues[:6]
    chosen = paced(dues, decode)
    longest = longest_paced(useful_step([due.seconds for due in dues], 0.0, decode), max(0.036, 2 * decode), LIMIT)
    rate = (longest - decode) / longest
    most = 0
    for chosen_bits in range(1 << len(dues)):
        end = 0.0
        kept = [due for number, due in enumerate(dues) if chosen_bits >> number & 1]
        for due in sorted(kept, key=lambda due: due.left):
            end += due.seconds
            if end > rate * due.left:
                break
        else:
            most = max(most, len(kept))
    assert len(chosen.first) == most


@given(work=st.floats(1e-3, 1.0), decode=DECODES, left=st.floats(1e-3, 1.0), more=st.floats(0.0, 1.0))
def test_needed_steps_are_longer_for_more_work_or_less_time(
    work: float, decode: float, left: float, more: float
) -> None:
    assert needed_step(work + more, left, decode) >= needed_step(work, left, decode)
    assert needed_step(work, left + more, decode) <= needed_step(work, left, decode) * (1 + 1e-12)


@given(works=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=8), decode=DECODES, factor=st.floats(0.3, 3.0))
def test_no_other_step_gives_earlier_first_tokens(works: list[float], decode: float, factor: float) -> None:
    def mean_wait(step: float) -> float:
        ends = [sum(works[: number + 1]) for number in range(len(works))]
        return step / 2 + sum(ends) / len(ends) * step / (step - decode)

    useful = useful_step(works, 0.0, decode)
    other = decode + factor * (useful - decode)
    assert mean_wait(useful) <= mean_wait(other) * (1 + 1e-9)


def test_a_shorter_prompt_passes_while_the_longer_one_has_time() -> None:
    long = Due(0.2, 0.5)
    assert paced([long, Due(0.02, 0.5)], 0.005).first == (1, 0)
    assert paced([Due(0.2, 0.25), Due(0.02, 0.5)], 0.005).first == (0, 1)


# ------------------------------------------------------------ the scheduler


def test_steps_exceed_the_itl_target_for_a_prompt_that_would_be_late() -> None:
    """The prompt takes 1.2 s alone: 1.35 s at the pace of the target."""
    seconds = {}
    for ttft_target in (0.0, 10.0, 1.28):
        model = Model()
        node = node_with_streams(model, ttft_target=ttft_target)
        add_prompts(node, 12_000)
        run_until(node, 100)
        mixed = [step.seconds for step in model.steps if step.mixed]
        seconds[ttft_target] = max(mixed)
        node.close()
    assert seconds[0.0] <= 1.02 * AUTO_ITL_STEPS * DECODE
    assert seconds[0.0] <= seconds[10.0] <= 1.02 * max(ITL_LIMIT, AUTO_ITL_STEPS * DECODE)
    assert seconds[1.28] >= 1.3 * seconds[0.0]
    assert seconds[1.28] <= 0.2 * 1.02  # a step of 2,000 tokens, the most


COSTS = SimulatedCosts(step=5e-3, prompt_token=20e-6, hidden=0.0, prompt_context=0.0, decode_context=0.0)
CARD = H100._replace(costs=COSTS, idle_step=5e-3)


def served(jobs: list[Job], ttft_target: float) -> list[Job]:
    simulation = Simulation(["decode"], round_robin, no_moves, card=CARD, ttft_target=ttft_target)
    simulation.run(jobs)
    return jobs


def overload(seconds: float, prompt: int = 2000) -> list[Job]:
    """40 requests per second, of 40 ms each, on a node."""
    return [Job(number / 40, prompt, 2) for number in range(int(40 * seconds))]


def test_under_overload_more_prompts_meet_their_objective_than_in_order_of_arrival() -> None:
    def met(ttft_target: float) -> float:
        jobs = served(overload(6.0), ttft_target)
        return sum(job.ttft <= 0.5 for job in jobs) / len(jobs)

    assert met(0.0) <= 0.25
    assert met(0.5) >= 0.42  # 1 / 1.6 of the load fits, and late prompts get a quarter of that


def test_new_prompts_meet_their_objective_behind_any_number_of_late_ones() -> None:
    jobs = served([Job(number / 100, 2000, 2) for number in range(1200)], 0.5)
    newest = [job for job in jobs if job.at >= 6.0]
    assert sum(job.ttft <= 0.5 for job in newest) >= 0.15 * len(newest)  # three quarters of a capacity of 25 per second


def test_no_late_prompt_starves_while_others_keep_coming() -> None:
    """One step in four begins with the oldest late prompt. Long ones are late first."""
    long = [Job(0.1 * number, 15_000, 2, awaited=False) for number in range(3)]
    jobs = served(sorted([*long, *overload(8.0)], key=lambda job: job.at), 0.5)
    last = max(job.at for job in jobs)
    assert all(0.0 < job.first < last for job in long)
    assert [job.number for job in long] == sorted(job.number for job in long)
    assert all(one.first < other.first for one, other in pairwise(long))


@pytest.mark.parametrize("ttft_target", [0.0, 0.5])
def test_each_request_ends_under_any_overload(ttft_target: float) -> None:
    jobs = served([Job(0.0, 500 + 37 * (number % 50), 20) for number in range(400)], ttft_target)
    assert all(job.tokens == 20 for job in jobs)
