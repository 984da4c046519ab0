"""The simulated runner keeps the promises of a model runner, and its steps take their cost in time."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from stepper import Stepper

import runner
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import node_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.protocols import ModelRunner
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange

EOS = {0, 2}  # end-of-sequence tokens of the embedded model


def build(*costs: str, speed: float = float("inf"), model: Path = EMBEDDED_MODEL, **asked: Any) -> ModelRunner:
    options = NodeOptions(model=str(model), engine="simulated", sim_costs=costs, sim_speed=speed, **asked)
    return runner.build(resolve(options, node_devices(options, 1)[0], {}), lambda stage, fraction: None)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(4096), k=length)


def seeded(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=1.0, seed=seed, **options)


def test_tokens_do_not_depend_on_the_batch_or_the_chunks() -> None:
    (alone,) = Stepper(build()).generate([prompt_of(40)], 6, seeded(7))
    together = Stepper(build(), seed=5).generate(
        [prompt_of(40), prompt_of(20, 1), prompt_of(9, 2)], 6, seeded(7), chunk=9, stagger=1
    )
    assert together[0].output == alone.output
    assert len({tuple(running.output) for running in together}) == 3


def test_tokens_stay_the_same_after_a_preemption_or_with_a_longer_prompt() -> None:
    (whole,) = Stepper(build()).generate([prompt_of(14)], 8, seeded(3))
    stepper = Stepper(build())
    seq = stepper.add(prompt_of(14), seeded(3))
    for at in (1, 5, 8):
        while len(stepper.live[seq].output) < at:
            stepper.step(chunk=6)
        seq = stepper.preempt(seq)
    assert stepper.live[seq].output == whole.output
    (migrated,) = Stepper(build()).generate([prompt_of(14) + whole.output[:5]], 3, seeded(3))
    assert migrated.output == whole.output[5:]


def test_random_tokens_depend_on_seed_and_choice() -> None:
    def outputs(*sampling: SamplingParams) -> int:
        return len({tuple(Stepper(build()).generate([prompt_of(9)], 4, params)[0].output) for params in sampling})

    assert outputs(seeded(1), seeded(2), seeded(3)) == 3
    assert outputs(*(SamplingParams(1, temperature=0.0, seed=seed) for seed in range(3))) == 1

    stepper = Stepper(build())
    seq = stepper.add(prompt_of(9), seeded(11, n=4))
    stepper.step(num_samples=4)
    drawn = [sample.token_id for sample in stepper.live[seq].others[0]]
    assert len(set(drawn)) == 4
    alone = Stepper(build())
    last = alone.add(prompt_of(9), seeded(11), choice=3)
    alone.step()
    assert alone.live[last].output == [drawn[3]]


def test_tokens_are_within_the_vocabulary_and_never_eos() -> None:
    (running,) = Stepper(build()).generate([prompt_of(3)], 20_000)
    assert not EOS & set(running.output)
    assert max(running.output) < 4096
    assert len(set(running.output)) > 3900


def test_logprobs_rank_the_sampled_token_first() -> None:
    (running,) = Stepper(build()).generate([prompt_of(3)], 5, seeded(1, logprobs=4))
    for token, sample in zip(running.output, running.samples, strict=True):
        assert sample.logprobs is not None
        assert sample.logprobs.top_ids[0] == token
        assert len(set(sample.logprobs.top_ids)) == 4
        assert sample.logprobs.top_logprobs[0] == sample.logprobs.logprob < 0
        assert list(sample.logprobs.top_logprobs) == sorted(sample.logprobs.top_logprobs, reverse=True)
    (plain,) = Stepper(build()).generate([prompt_of(3)], 5, seeded(1))
    assert [sample.logprobs for sample in plain.samples] == [None] * 5


@pytest.mark.parametrize("mean", [1.0, 1.8, 2.5, 4.0])
def test_decodes_yield_the_same_tokens_in_fewer_steps(mean: float) -> None:
    """At any number of drafts up to three; log-probabilities belong to the tokens."""
    sampling = seeded(4, logprobs=1)
    (alone,) = Stepper(build()).generate([prompt_of(9)], 600, sampling)
    model_runner = build(synthetic_acceptance=mean)
    new = NewSequence(0, pack_tokens(prompt_of(9)), 9, 0, (0,), sampling)
    first = model_runner.launch(StepPlan(1, new=(new,), scheduled=(ScheduledSequence(0, 9, 1),))).result()
    assert first.decode_counts == ()
    tokens = list(first.token_ids)
    best = [first.logprobs[0].top_ids[0]]
    counts = list[int]()
    while len(tokens) < 500:
        plan = StepPlan(2, scheduled=(ScheduledSequence.decode(0, num_drafts=3),), num_decodes=1)
        output = model_runner.launch(plan).result()
        assert output.decode_counts == (len(output.token_ids),)
        counts += output.decode_counts
        tokens += output.token_ids
        best += [output.logprobs[index].top_ids[0] for index in range(len(output.token_ids))]
    assert tokens == best == alone.output[: len(tokens)]
    assert sum(counts) / len(counts) == pytest.approx(mean, abs=0.25)
    for num_drafts in range(3):
        plan = StepPlan(2, scheduled=(ScheduledSequence.decode(0, num_drafts),), num_decodes=1)
        assert 1 <= len(model_runner.launch(plan).result().token_ids) <= 1 + num_drafts


def test_no_token_follows_the_crash_token_in_a_step() -> None:
    (alone,) = Stepper(build()).generate([prompt_of(9)], 30)
    crash = alone.output[7]
    model_runner = build(synthetic_acceptance=4.0, sim_crash_token=crash)
    new = NewSequence(0, pack_tokens(prompt_of(9)), 9, 0, (0,), SamplingParams(1, temperature=0.0))
    tokens = list(
        model_runner.launch(StepPlan(1, new=(new,), scheduled=(ScheduledSequence(0, 9, 1),))).result().token_ids
    )
    decode = StepPlan(2, scheduled=(ScheduledSequence.decode(0, num_drafts=3),), num_decodes=1)
    while crash not in tokens:
        tokens += model_runner.launch(decode).result().token_ids
    with pytest.raises(RuntimeError, match=f"token {crash} is in a step"):
        model_runner.launch(decode)
    assert tokens == alone.output[:8]


def test_a_step_launched_during_another_ends_after_it_by_its_own_cost() -> None:
    model_runner = build("step=0.1", "prompt-token=0.002", "decode=0.04", "hidden=0", speed=2.0)
    start = time.monotonic()
    new = NewSequence(0, pack_tokens(prompt_of(50)), 50, 0, (0, 1, 2, 3), SamplingParams(1, temperature=0.0))
    first = model_runner.launch(StepPlan(1, new=(new,), scheduled=(ScheduledSequence(0, 50, 1),)))
    second = model_runner.launch(StepPlan(2, scheduled=(ScheduledSequence.decode(0),), num_decodes=1))
    assert len(first.result().token_ids) == 1
    assert time.monotonic() - start > 0.0999
    assert len(second.result().token_ids) == 1
    assert time.monotonic() - start > 0.1699


@pytest.mark.parametrize("speed", [1.0, float("inf")])
def test_a_plan_without_work_takes_no_time(speed: float) -> None:
    model_runner = build("step=1000", speed=speed)
    assert model_runner.launch(StepPlan(1, finished=(5,))).result().token_ids == ()
    model_runner.close()
    model_runner.close()


def test_tokens_depend_on_the_content_of_checkpoints_and_patches(tmp_path: Path) -> None:
    """A reload gives the tokens of a node that starts with the checkpoint; two patches in two orders differ."""
    other = tmp_path / "other"
    shutil.copytree(EMBEDDED_MODEL, other)
    weights = next(other.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    patches = []
    for number in range(2):
        patches.append(tmp_path / f"{number}.safetensors")
        header = json.dumps({"norm.weight.rows.0": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        patches[-1].write_bytes(len(header).to_bytes(8, "little") + header + bytes([number]))

    def tokens(*changes: WeightChange, model: Path = EMBEDDED_MODEL) -> tuple[int, ...]:
        built = build(model=model)
        for change in changes:
            built.check_weights(change)
            built.change_weights(change)
        return tuple(Stepper(built).generate([prompt_of(9)], 4)[0].output)

    first, second = (WeightChange(patch=str(patch)) for patch in patches)
    assert tokens(WeightChange(str(other))) == tokens(first, WeightChange(str(other))) == tokens(model=other)
    assert tokens(first, second) == tokens(first, second)
    changes = (), (WeightChange(str(other)),), (first,), (second,), (first, second), (second, first)
    assert len({tokens(*change) for change in changes}) == len(changes)
