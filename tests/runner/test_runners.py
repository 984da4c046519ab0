"""Promises of both runners to the engine: choices, preemption, transferred blocks, independence of the batch."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from small_tokenizers import byte_level
from stepper import GREEDY, Stepper, copy_to

import runner
from engine.token_rules import ChoiceRules, TokenRules
from pdserve.errors import CapacityError
from pdserve.grammar import Grammar, GrammarVocabulary, from_regex, intersection
from pdserve.pausing import complete
from pdserve.protocols import ModelRunner
from pdserve.records import DigestOrder, NewSequence, ScheduledSequence, StepPlan, TokenMask
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from runner.base import BaseModelRunner
from runner.step_parts import StepWithParts
from runner.warmup import run_largest_steps, run_mixed_steps, run_small_steps

Build = Callable[..., ModelRunner]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs V2's kernels


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


def build_runner(checkpoint: Path, version: str, **options: Any) -> ModelRunner:
    if version == "V2":
        options = {"attention_backend": "triton", "device": DEVICE} | options
    return runner.build(node_config(checkpoint, runner=version, **options), lambda stage, fraction: None)


@pytest.fixture(params=["V1", "V2"])
def build(request: pytest.FixtureRequest, checkpoint: Path) -> Build:
    return functools.partial(build_runner, checkpoint, request.param)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(128) for _ in range(length)]


def seeded(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=1.5, seed=seed, **options)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_result_waits_for_the_kv_of_a_step_that_samples_nothing(checkpoint: Path, version: str) -> None:
    """A peer may read the KV, outside of our streams, as soon as the engine has applied the step."""
    model_runner = build_runner(checkpoint, version, device=DEVICE)
    new = NewSequence(0, pack_tokens(prompt_of(300)), 300, 0, tuple(range(20)), SamplingParams(max_tokens=1))
    torch.cuda._sleep(1 << 28)  # cycles: later work on the stream runs long after its launch
    pending = model_runner.launch(StepPlan(0, new=(new,), scheduled=(ScheduledSequence(0, 256, 0),)))
    assert version == "V1" or not torch.cuda.current_stream().query()  # V1 may wait as early as in its launch
    pending.result()
    assert torch.cuda.current_stream().query()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_results_arrive_while_a_long_step_is_launched(checkpoint: Path) -> None:
    model_runner = build_runner(checkpoint, "V2", device=DEVICE)
    new = NewSequence(0, pack_tokens(prompt_of(900)), 900, 0, tuple(range(60)), SamplingParams(max_tokens=1))
    earlier = model_runner.launch(StepPlan(0, new=(new,), scheduled=(ScheduledSequence(0, 16, 0),)))
    earlier.result()
    assert earlier.done()
    torch.cuda._sleep(1 << 28)
    plan = StepPlan(1, scheduled=(ScheduledSequence(0, 600, 0),))
    assert model_runner.launches_by_layer(plan)
    launch = model_runner.launch_with_pauses(plan)
    next(launch)  # the pause between its two layers
    assert earlier.done()
    later = complete(launch)
    assert not later.done()
    later.result()
    assert later.done()


def test_result_can_be_taken_between_the_layers_of_the_next_step(build: Build) -> None:
    model_runner = build()
    (expected,) = Stepper(build()).generate([prompt_of(5)], 2)
    new = NewSequence(0, pack_tokens(prompt_of(5)), 5, 0, (0,), GREEDY)
    first = model_runner.launch(StepPlan(0, new=(new,), scheduled=(ScheduledSequence(0, 5, 1),)))
    if model_runner.max_in_flight == 1:
        first.result()
    decode = StepPlan(1, scheduled=(ScheduledSequence.decode(0),), num_decodes=1)
    launch = model_runner.launch_with_pauses(decode)
    next(launch)
    if model_runner.max_in_flight > 1:
        assert list(first.result().token_ids) == expected.output[:1]
    (token_id,) = complete(launch).result().token_ids
    assert token_id == expected.output[1]


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_seeded_tokens_do_not_depend_on_the_batch(build: Build) -> None:
    sampling = seeded(7, top_k=50, presence_penalty=0.3)
    (alone,) = Stepper(build()).generate([prompt_of(20)], 6, sampling)
    crowd = Stepper(build(), seed=5)
    for seed in range(3):
        crowd.add(prompt_of(5 + 7 * seed, seed + 1), seeded(seed))
    crowd.step(chunk=9)
    seq = crowd.add(prompt_of(20), sampling)
    while len(crowd.live[seq].output) < 6:
        crowd.step(chunk=9)
    assert crowd.live[seq].output == alone.output


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_a_preempted_request_continues_with_the_same_tokens(build: Build) -> None:
    sampling = seeded(3, repetition_penalty=1.2, frequency_penalty=0.1, min_tokens=5)
    (undisturbed,) = Stepper(build()).generate([prompt_of(14)], 7, sampling)
    stepper = Stepper(build())
    seq = stepper.add(prompt_of(14), sampling)
    for at in (1, 4, 7):
        while len(stepper.live[seq].output) < at:
            stepper.step(chunk=11)
        seq = stepper.preempt(seq)
    assert stepper.live[seq].output == undisturbed.output


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_a_sequence_continues_behind_blocks_that_came_after_its_first_ones(build: Build) -> None:
    """As after a split pull: the sequence ends and begins again in one step, under its number."""
    model_runner = build()
    prompt = prompt_of(40)
    block = model_runner.kv_layout.block_size
    assert block == 16
    source = NewSequence(0, pack_tokens(prompt), 40, 0, (0, 1, 2), GREEDY)
    (expected,) = (
        model_runner.launch(StepPlan(0, new=(source,), scheduled=(ScheduledSequence(0, 40, 1),))).result().token_ids
    )
    first = NewSequence(1, pack_tokens(prompt), 40, 0, (3,), GREEDY)
    model_runner.launch(StepPlan(1, new=(first,), scheduled=(ScheduledSequence(1, 16, 0),))).result()
    whole = msgspec.structs.replace(first, num_computed=32, block_ids=(3, 1, 4))
    plan = StepPlan(2, finished=(1,), new=(whole,), scheduled=(ScheduledSequence(1, 8, 1),))
    assert model_runner.launch(plan).result().token_ids == (expected,)


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_choices_share_a_prompt_and_differ(build: Build) -> None:
    sampling = seeded(11, n=4)
    stepper = Stepper(build())
    first = stepper.add(prompt_of(9), sampling)
    stepper.step(num_samples=4)
    drawn = [sample.token_id for sample in stepper.live[first].others[0]]
    assert len(set(drawn)) > 1
    seqs = [first] + [
        stepper.add([*prompt_of(9), drawn[choice]], sampling, prompt_len=9, choice=choice) for choice in (1, 2, 3)
    ]
    while len(stepper.live[seqs[0]].output) < 4:
        stepper.step()
    outputs = [stepper.live[seq].output[:3] for seq in seqs]
    assert len({tuple(output) for output in outputs}) == 4
    # A choice that runs alone, from its first token on, samples the same tokens.
    alone = Stepper(build())
    seq = alone.add([*prompt_of(9), drawn[2]], sampling, prompt_len=9, choice=2)
    while len(alone.live[seq].output) < 3:
        alone.step()
    assert alone.live[seq].output == outputs[2]


def test_a_cached_prefix_is_not_computed_again(build: Build) -> None:
    stepper = Stepper(build())
    seq = stepper.add(prompt_of(32))
    stepper.step()
    blocks = stepper.live[seq].blocks
    token = stepper.live[seq].output[0]
    prompt = pack_tokens(prompt_of(32))
    sampling = SamplingParams(1, temperature=0)
    hit = NewSequence(100, prompt, 32, 16, (blocks[0], stepper.free[0]), sampling)
    output = stepper.runner.launch(StepPlan(9, new=(hit,), scheduled=(ScheduledSequence(100, 16, 1),))).result()
    assert output.token_ids == (token,)


@pytest.mark.parametrize(
    ("source_version", "target_version", "block_size", "page"),
    [
        ("V1", "V1", 48, 16),
        ("V1", "V1", 16, 4),
        ("V1", "V2", 16, 16),
        ("V2", "V1", 48, 16),
        pytest.param("V2", "V2", 32, 32, marks=pytest.mark.slow),
    ],
)
def test_blocks_copied_as_bytes_continue_on_another_runner(
    checkpoint: Path, source_version: str, target_version: str, block_size: int, page: int
) -> None:
    if DEVICE != "cpu" and "V2" in (source_version, target_version):
        pytest.skip("blocks are copied in host memory, where V2 needs Triton's interpreter")
    options = {"block_size": block_size, "kernel_block_size": page, "num_blocks": 30, "device": "cpu"}
    prompt = prompt_of(52)
    (expected,) = Stepper(build_runner(checkpoint, "V1", **options)).generate([prompt], 5)
    source = Stepper(build_runner(checkpoint, source_version, **options), seed=1)
    seq = source.add(prompt)
    while not source.live[seq].output:
        source.step(chunk=33)
    target = Stepper(build_runner(checkpoint, target_version, **options), seed=2)
    new = copy_to(target, source, seq)
    assert target.runner.kv_region.address % 4096 == 0
    while len(target.live[new].output) < 5:
        target.step()
    assert target.live[new].output == expected.output


def test_eos_is_not_sampled_before_min_tokens(build: Build) -> None:
    bias = {2: 100.0}  # EOS wins always
    early = Stepper(build()).generate([prompt_of(5)], 1, SamplingParams(1, temperature=0, logit_bias=bias))
    assert early[0].output == [2]
    late = Stepper(build()).generate([prompt_of(5)], 5, SamplingParams(1, temperature=0, logit_bias=bias, min_tokens=4))
    assert [token == 2 for token in late[0].output] == [False] * 4 + [True]


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_warm_up_leaves_no_sequence_and_no_effect(build: Build, checkpoint: Path) -> None:
    """After warm-up, also of drafts, the most sequences still fit, and tokens are those without it."""
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_batch_tokens": 20, "max_model_len": 64, "num_blocks": 12}
    (expected,) = Stepper(build_runner(checkpoint, "V1")).generate([prompt_of(12)], 4)
    model_runner = build(**limits)
    config = msgspec.structs.replace(node_config(checkpoint, **limits), max_drafts=3)
    run_largest_steps(model_runner, config)
    run_small_steps(model_runner, config)
    run_mixed_steps(model_runner, config)
    assert isinstance(model_runner, BaseModelRunner)
    model_runner._model.decoder.run_products([3, 20], [1, 2])
    (sequence,) = Stepper(model_runner).generate([prompt_of(12)], 4)
    assert sequence.output == expected.output


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_warm_up_fits_where_a_step_holds_more_than_one_sequence_may_have(
    max_drafts: int, build: Build, checkpoint: Path
) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_batch_tokens": 160, "max_model_len": 64, "num_blocks": 12}
    model_runner = build(**limits)
    config = msgspec.structs.replace(node_config(checkpoint, **limits), max_drafts=max_drafts)
    run_largest_steps(model_runner, config)
    run_mixed_steps(model_runner, config)
    assert len(Stepper(model_runner).generate([prompt_of(63)], 1)[0].output) == 1


def test_a_plan_without_work_updates_state_only(build: Build) -> None:
    stepper = Stepper(build())
    seq = stepper.add(prompt_of(5))
    stepper.step()
    assert stepper.runner.launch(StepPlan(5, finished=(seq, 999))).result().token_ids == ()


def test_only_a_step_whose_plan_asks_for_them_has_parts(build: Build) -> None:
    model_runner = build()
    new = NewSequence(0, pack_tokens(prompt_of(20)), 20, 0, (0, 1), SamplingParams(1, temperature=0))
    plain = model_runner.launch(StepPlan(0, new=(new,), scheduled=(ScheduledSequence(0, 20, 1),)))
    assert not isinstance(plain, StepWithParts)
    assert plain.result().digests == ()
    mask = TokenMask(0, (1 << 7).to_bytes(16, "little"))  # allows token 7 alone of 128
    orders = (DigestOrder((0, 1), 20),)
    one = (ScheduledSequence.decode(0),)
    parts = model_runner.launch(StepPlan(1, scheduled=one, digests=orders, masks=(mask,)))
    assert isinstance(parts, StepWithParts)
    output = parts.result()
    assert output.token_ids == (7,)
    assert [len(digests) for digests in output.digests] == [2]


@pytest.mark.parametrize("vocab_size", [288, 300])  # one divides by 32
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_a_step_mixes_grammars_and_token_rules(tmp_path: Path, version: str, vocab_size: int) -> None:
    """Each sequence has a mask of another origin, as two requests in one step may; one has none."""
    checkpoint = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=vocab_size)
    tokenizer = byte_level(corpus=[])
    (zero,) = tokenizer.encode("0").ids
    grammar = Grammar(from_regex("0"), GrammarVocabulary(tokenizer.to_str(), vocab_size, [1]))
    limited = TokenRules(SamplingParams(1, allowed_token_ids=(5, 7), bad_words=((5,),)), vocab_size)
    thinking = TokenRules(SamplingParams(1, thinking_token_budget=0, thinking_end_ids=(9,)), vocab_size)
    forced = ChoiceRules(thinking).masks(array("I", [1]), 1, ())[0]
    without_five = TokenRules(SamplingParams(1, bad_words=((5,),)), vocab_size).fixed
    masks = [
        (grammar.first_mask, zero),
        (limited.fixed, 7),
        (forced, 9),
        (intersection(grammar.first_mask, [without_five]), zero),
    ]
    seqs = range(len(masks) + 1)
    plan = StepPlan(
        0,
        new=tuple(NewSequence(seq, pack_tokens([1, 2]), 2, 0, (seq,), GREEDY) for seq in seqs),
        scheduled=tuple(ScheduledSequence(seq, 2, 1) for seq in seqs),
        masks=tuple(TokenMask(seq, words) for seq, (words, _) in zip(seqs, masks, strict=False)),
    )
    token_ids = build_runner(checkpoint, version).launch(plan).result().token_ids
    assert list(token_ids[: len(masks)]) == [token_id for _, token_id in masks]


def test_close_is_idempotent(build: Build) -> None:
    model_runner = build()
    model_runner.close()
    model_runner.close()


def test_a_cache_larger_than_memory_is_an_error(build: Build) -> None:
    with pytest.raises(CapacityError, match=r"KV cache \(.* GiB\) need more than the .* GiB.*--kv-cache-memory"):
        build(num_blocks=1 << 40)


def test_progress_rises_to_one(checkpoint: Path) -> None:
    seen: list[tuple[str, float]] = []
    runner.build(node_config(checkpoint), lambda stage, fraction: seen.append((stage, fraction)))
    assert seen[-1] == ("loading weights", 1.0)
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)
