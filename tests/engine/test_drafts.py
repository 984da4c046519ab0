"""Several tokens per decode and step: outputs equal outputs without drafts, also where drafts are wrong."""

from __future__ import annotations

import itertools

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_world import ScriptedJob, ScriptedWorld
from test_handoff import jobs
from toy import ErringSource, reference
from toy_node import BATCH_TOKENS, BLOCK, DEPTHS, Make, ModelledPipeline, Node

from pdserve.ipc.messages import Mode, Pause, Resume
from pdserve.records import FinishReason, StepPlan
from pdserve.sampling_params import SamplingParams

DRAFTS = st.integers(1, 4)
each_depth = pytest.mark.parametrize("depth", DEPTHS, ids=str)


def output_of(prompt: list[int], choice: int, sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    tokens = reference(prompt, choice, sampling.max_tokens)
    for index, token in enumerate(tokens):
        if token in sampling.stop_token_ids and index + 1 >= sampling.min_tokens:
            return tokens[: index + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int]:
    """Return a prompt, sampling parameters with stop ids that the output has, and the step of arrival."""
    prompt = [draw(st.integers(5, 8))] * draw(st.integers(1, 30))
    choices = draw(st.integers(1, 3))
    stops = draw(st.lists(st.integers(1, 20), max_size=2))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 20)),
        min_tokens=draw(st.integers(0, 12)),
        n=choices,
        stop_token_ids=tuple({reference(prompt, at % choices, at)[-1] for at in stops}),
    )
    return prompt, sampling, draw(st.integers(0, 12))


@each_depth
@given(
    wanted=st.lists(requests(), min_size=1, max_size=10),
    drafts=DRAFTS,
    num_blocks=st.integers(14, 40),
    pauses=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans()), max_size=12),
    layered=st.booleans(),
    planned=st.booleans(),
)
@examples(30)
def test_outputs_are_exact_under_preemption(
    depth: tuple[int, int],
    wanted: list[tuple[list[int], SamplingParams, int]],
    drafts: int,
    num_blocks: int,
    pauses: list[tuple[int, int, bool]],
    layered: bool,
    planned: bool,
) -> None:
    """Stop ids before and after ``min_tokens``, n choices, pauses, and too few blocks. Then all blocks are free.

    Requests whose prompts are earlier prompts with their outputs find no KV of rejected drafts in the prefix cache.
    """
    node = Node(num_blocks, *depth, max_drafts=drafts, planned_drafts=planned, layered=layered)
    expected: dict[tuple[int, int], tuple[list[int], FinishReason]] = {}
    for step in range(21):
        for rid, (prompt, sampling, arrival) in enumerate(wanted):
            if arrival == step:
                node.submit(rid, prompt, sampling, Mode.LOCAL, client=rid % 2)
                expected |= {(rid, choice): output_of(prompt, choice, sampling) for choice in range(sampling.n)}
        for at, rid, paused in pauses:
            if at == step:
                node.obey(Pause(rid) if paused else Resume(rid))
        node.step()
    for rid in range(len(wanted)):
        node.obey(Resume(rid))
    node.run()
    assert {key: (node.tokens[key], node.finished[key]) for key in expected} == expected
    assert node.scheduler.status().totals.sampled_tokens == sum(len(tokens) for tokens, _ in expected.values())
    node.assert_all_free()

    for rid, (prompt, _, _) in enumerate(wanted, len(wanted)):
        longer = prompt + node.tokens[rid - len(wanted), 0]
        node.submit(rid, longer, SamplingParams(max_tokens=3), Mode.LOCAL)
        node.run()
        assert node.tokens[rid, 0] == reference(longer, 0, 3)
    node.close()


@each_depth
@given(
    wanted=st.lists(jobs(), min_size=1, max_size=10),
    blocks=st.tuples(st.integers(14, 32), st.integers(14, 32)),
    drafts=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    checksum=st.booleans(),
    planned=st.booleans(),
)
@examples(30)
def test_outputs_are_exact_through_handoffs(
    depth: tuple[int, int],
    wanted: list[ScriptedJob],
    blocks: tuple[int, int],
    drafts: tuple[int, int],
    checksum: bool,
    planned: bool,
) -> None:
    """P and D need not draft alike. P decodes ahead; requests end, are given up, preempted, or resumed."""
    world = ScriptedWorld(depth, blocks, wanted, drafts=drafts, planned_drafts=planned, checksum=checksum)
    world.run()
    world.close()


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("drafts", [(3, 0), (0, 3), (3, 3)])
def test_outputs_continue_after_tokens_that_p_decoded_ahead(
    drafts: tuple[int, int], depth: tuple[int, int], planned: bool
) -> None:
    """P decodes all tokens ahead that it may for the first request; how many for the others depends on threads."""
    sampling = SamplingParams(max_tokens=40)
    some = [
        ScriptedJob(
            [rid] * 30, sampling, mode=Mode.HANDOFF, ahead=20, arrival=40 * rid, what="" if rid else "delay reads"
        )
        for rid in range(3)
    ]
    world = ScriptedWorld(depth, (96, 72), some, drafts=drafts, planned_drafts=planned)
    world.run()
    ahead = [plan for plan in world.p.node.runner.launched if plan.num_decodes]
    assert any(plan.num_drafts for plan in ahead) == (drafts[0] > 0)
    assert any(plan.num_drafts for plan in world.d.node.runner.launched) == (drafts[1] > 0)
    world.close()


@pytest.mark.parametrize("planned", [False, True])
def test_drafts_save_steps(make: Make, planned: bool) -> None:
    steps = []
    for drafts in (0, 3):
        node = make(64, max_drafts=drafts, planned_drafts=planned)
        node.submit(0, [1] * 5, SamplingParams(max_tokens=60), Mode.LOCAL)
        node.run()
        assert node.tokens[0, 0] == reference([1] * 5, 0, 60)
        steps.append(len([plan for plan in node.runner.launched if plan.scheduled]))
    assert steps[0] == 60
    assert steps[1] < 45


def test_a_decode_has_no_more_drafts_than_tokens_may_follow(make: Make) -> None:
    """No KV is written, and no block is needed, behind the longest output."""
    node = make(2, max_drafts=4)
    node.submit(0, [1, 2], SamplingParams(max_tokens=2 * BLOCK - 2), Mode.LOCAL)
    node.run()
    assert node.tokens[0, 0] == reference([1, 2], 0, 2 * BLOCK - 2)


def test_drafts_leave_room_for_prompts_in_the_same_step(make: Make) -> None:
    node = make(64, max_drafts=1)
    for rid in range(4):
        node.submit(rid, [rid], SamplingParams(max_tokens=30), Mode.LOCAL)
    for _ in range(4):
        node.step()
    node.submit(4, [4] * 2 * BATCH_TOKENS, SamplingParams(max_tokens=2), Mode.LOCAL)
    node.run()
    mixed = [plan for plan in node.runner.launched if plan.num_drafts and plan.num_prompt_tokens]
    assert mixed
    assert max(plan.num_tokens for plan in mixed) <= BATCH_TOKENS
    assert node.tokens[4, 0] == reference([4] * 2 * BATCH_TOKENS, 0, 2)


def test_masked_sequences_have_no_drafts_of_the_runner(make: Make) -> None:
    node = make(64, max_drafts=3)
    node.submit(0, [1, 2, 3], SamplingParams(20, allowed_token_ids=(6, 7)), Mode.LOCAL)
    node.submit(1, [1, 2, 3], SamplingParams(20), Mode.LOCAL)
    node.run()
    assert set(node.tokens[0, 0]) <= {6, 7}
    assert node.tokens[1, 0] == reference([1, 2, 3], 0, 20)
    masked = {mask.seq for plan in node.runner.launched for mask in plan.masks}
    drafted = {
        item.seq for plan in node.runner.launched for item in plan.scheduled[: plan.num_decodes] if item.num_tokens > 1
    }
    assert masked
    assert drafted
    assert not masked & drafted


def run_with_costs(
    monkeypatch: pytest.MonkeyPatch,
    depth: tuple[int, int],
    draft: float,
    right: float,
    sequences: int = 1,
    most: int = 3,
) -> Node:
    """A step takes 1 s, 0.01 s per sequence, and ``draft`` s per draft. Each draft is right with a probability."""
    monkeypatch.setattr(ErringSource, "right", right)

    def seconds(plan: StepPlan) -> float:
        return 1.0 + 0.01 * len(plan.scheduled) + draft * plan.num_drafts

    node = Node(700, *depth, max_drafts=most, planned_drafts=True, always_draft=False, seconds=seconds)
    for rid in range(sequences):
        node.submit(rid, [rid] * 5, SamplingParams(max_tokens=300), Mode.LOCAL)
    node.run()
    for rid in range(sequences):
        assert node.tokens[rid, 0] == reference([rid] * 5, 0, 300)
    node.close()
    return node


def seconds_per_token(node: Node) -> float:
    pipeline = node.engine._pipeline
    assert isinstance(pipeline, ModelledPipeline)
    plans = [plan for plan in node.runner.launched if plan.num_decodes]
    return sum(map(pipeline._seconds, plans)) / sum(len(tokens) for tokens in node.tokens.values())


each_node = pytest.mark.parametrize("depth", [(1, 1), (2, 1)], ids=str)
slow = pytest.mark.slow


@each_node
def test_cheap_and_right_drafts_are_used(monkeypatch: pytest.MonkeyPatch, depth: tuple[int, int]) -> None:
    for sequences in (1, 8):
        node = run_with_costs(monkeypatch, depth, draft=0.005, right=0.95, sequences=sequences)
        off = run_with_costs(monkeypatch, depth, 0.0, 0.0, sequences, most=0)
        assert seconds_per_token(node) < 0.7 * seconds_per_token(off)


@pytest.mark.parametrize(
    ("draft", "right", "depth"),
    [
        (0.005, 0.0, (1, 1)),
        (0.6, 0.5, (2, 1)),
        *(pytest.param(*case, (2, 1), marks=slow) for case in ((0.005, 0.0), (0.3, 0.05), (0.9, 0.7))),
        *(pytest.param(*case, (1, 1), marks=slow) for case in ((0.3, 0.05), (0.6, 0.5), (0.9, 0.7))),
    ],
)
def test_drafts_that_are_not_worth_their_time_stop(
    monkeypatch: pytest.MonkeyPatch, depth: tuple[int, int], draft: float, right: float
) -> None:
    for sequences in (1, 8):
        node = run_with_costs(monkeypatch, depth, draft, right, sequences)
        late = [plan for plan in node.runner.launched if plan.num_decodes][40:]
        assert sum(plan.num_drafts for plan in late) <= 0.1 * sum(plan.num_decodes for plan in late)


EVERYDAY = [(0.05, 0.9, (2, 1)), (0.3, 0.0, (1, 1))]


@pytest.mark.parametrize(
    ("draft", "right", "depth"),
    [
        pytest.param(*case, marks=[] if case in EVERYDAY else slow)
        for case in itertools.product((0.0, 0.05, 0.3), (0.0, 0.3, 0.9), ((1, 1), (2, 1)))
    ],
)
def test_steps_with_drafts_are_worth_their_time(
    monkeypatch: pytest.MonkeyPatch, depth: tuple[int, int], draft: float, right: float
) -> None:
    """A token takes at most 3 % longer than without drafts."""
    for sequences in (1, 4, 8):
        node = run_with_costs(monkeypatch, depth, draft, right, sequences)
        off = run_with_costs(monkeypatch, depth, draft, right, sequences, most=0)
        assert seconds_per_token(node) < 1.03 * seconds_per_token(off)


def test_drafts_begin_once_probes_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErringSource, "right", 0.0)
    node = Node(400, 1, max_drafts=3, planned_drafts=True, always_draft=False, seconds=lambda plan: 1.0)
    node.submit(0, [1] * 5, SamplingParams(max_tokens=300), Mode.LOCAL)
    for _ in range(100):
        node.step()
    assert not sum(plan.num_drafts for plan in node.runner.launched[60:])
    monkeypatch.setattr(ErringSource, "right", 1.0)
    node.run()
    assert sum(plan.num_drafts for plan in node.runner.launched[100:]) > 100
    assert node.tokens[0, 0] == reference([1] * 5, 0, 300)
    node.close()
