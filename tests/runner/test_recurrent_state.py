"""Slots of recurrent state in both runners: zeros, copies, snapshots, digests, and states that a peer has computed."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from staged_node import Request, generate
from stepper import GREEDY, Stepper

import runner
from connector.backends.null import NullConnector
from connector.setup import ConnectorSetup
from engine.executor.rank import Rank
from pdserve.kv.states import NO_SLOT
from pdserve.protocols import ModelRunner
from pdserve.records import DigestOrder, NewSequence, ScheduledSequence, StepOutput, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from runner.warmup import run_largest_steps, run_mixed_steps, run_small_steps

Build = Callable[..., ModelRunner]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs V2's kernels
NUM_TOKENS = 3


LAYERS = ["linear_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": LAYERS},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": LAYERS},
    "nemotron_h": {"hybrid_override_pattern": "M*ME"},
    "falcon_h1": {},
}
_SLOW = ("granitemoehybrid", "falcon_h1")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in FAMILIES]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, **FAMILIES[request.param])


def build_runner(checkpoint: Path, version: str, **options: Any) -> ModelRunner:
    if version == "V2":
        options = {"attention_backend": "triton", "device": DEVICE} | options
    return runner.build(node_config(checkpoint, runner=version, **options), lambda stage, fraction: None)


@pytest.fixture(params=["V1", "V2"])
def build(request: pytest.FixtureRequest, checkpoint: Path) -> Build:
    return functools.partial(build_runner, checkpoint, request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Callable[[list[int]], list[int]]:
    model = reference_model(checkpoint)
    return lambda prompt: reference_greedy(model, prompt, NUM_TOKENS)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(128) for _ in range(length)]


def new(
    seq: int, tokens: list[int], blocks: tuple[int, ...], slot: int, computed: int = 0, source: int = NO_SLOT
) -> NewSequence:
    packed = pack_tokens(tokens)
    return NewSequence(seq, packed, len(tokens), computed, blocks, GREEDY, state_slot=slot, state_from=source)


def step(model_runner: ModelRunner, number: int, *scheduled: tuple[int, int, int], **fields: Any) -> StepOutput:
    sequences = tuple(ScheduledSequence(*of_sequence) for of_sequence in scheduled)
    return model_runner.launch(StepPlan(number, scheduled=sequences, **fields)).result()


def decode(model_runner: ModelRunner, seqs: tuple[int, ...], steps: int) -> list[list[int]]:
    """Return the tokens of each sequence."""
    sampled = []
    for number in range(steps):
        scheduled = tuple(ScheduledSequence.decode(seq) for seq in seqs)
        plan = StepPlan(100 + number, scheduled=scheduled, num_decodes=len(seqs))
        sampled.append(model_runner.launch(plan).result().token_ids)
    return [list(tokens) for tokens in zip(*sampled, strict=True)]


def slot_bytes(model_runner: ModelRunner, slot: int) -> bytes:
    layout = model_runner.state_layout
    region = model_runner.state_region
    assert layout is not None
    assert region is not None
    if region.device == "cuda":
        return bytes(model_runner._states.slots[slot].cpu().numpy())  # type: ignore[attr-defined]
    return ctypes.string_at(region.address + slot * layout.slot_bytes, layout.slot_bytes)


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_a_snapshot_continues_with_other_tokens(build: Build, expected: Callable[[list[int]], list[int]]) -> None:
    """The first sequence goes on, so that its own slot has another state when the snapshot is used."""
    model_runner = build()
    prefix = prompt_of(32)
    first = prefix + prompt_of(9, 1)
    second = prefix + prompt_of(20, 2)
    step(model_runner, 0, (0, 32, 0), new=(new(0, first, (0, 1, 2), slot=3),), state_copies=((3, 6),))
    snapshot = slot_bytes(model_runner, 6)
    assert snapshot == slot_bytes(model_runner, 3)
    one = list(step(model_runner, 1, (0, 9, 1)).token_ids)
    assert slot_bytes(model_runner, 6) == snapshot != slot_bytes(model_runner, 3)
    hit = new(1, second, (0, 1, 4, 5), slot=0, computed=32, source=6)
    two = list(step(model_runner, 2, (1, 20, 1), new=(hit,)).token_ids)
    rest = decode(model_runner, (0, 1), NUM_TOKENS - 1)
    assert [one + rest[0], two + rest[1]] == [expected(first), expected(second)]
    assert slot_bytes(model_runner, 6) == snapshot


def test_a_used_slot_starts_again_with_zeros(build: Build, expected: Callable[[list[int]], list[int]]) -> None:
    model_runner = build(state_slots=2)
    step(model_runner, 0, (0, 20, 1), new=(new(0, prompt_of(20), (0, 1), slot=1),))
    prompt = prompt_of(5, 3)
    first = list(step(model_runner, 1, (1, 5, 1), finished=(0,), new=(new(1, prompt, (2,), slot=1),)).token_ids)
    assert first + decode(model_runner, (1,), NUM_TOKENS - 1)[0] == expected(prompt)


def test_slots_are_copied_also_without_a_batch(build: Build) -> None:
    model_runner = build()
    step(model_runner, 0, (0, 20, 1), new=(new(0, prompt_of(20), (0, 1), slot=1),))
    assert step(model_runner, 1, state_copies=((1, 4), (4, 5))).token_ids == ()
    assert slot_bytes(model_runner, 1) == slot_bytes(model_runner, 4) == slot_bytes(model_runner, 5)


@pytest.mark.skipif(DEVICE != "cpu", reason="states are copied in host memory, where V2 needs Triton's interpreter")
def test_a_state_that_was_read_from_a_peer_continues(
    checkpoint: Path, expected: Callable[[list[int]], list[int]]
) -> None:
    prompt = prompt_of(32)
    prefill, decoding = (build_runner(checkpoint, version, device="cpu") for version in ("V1", "V2"))
    step(prefill, 0, (0, 31, 0), new=(new(0, prompt, (5, 2), slot=3),), state_copies=((3, 4),))
    layout = prefill.state_layout
    kv = prefill.kv_layout
    ours = decoding.state_region
    theirs = prefill.state_region
    assert layout is not None
    assert ours is not None
    assert theirs is not None
    assert ours.address % 4096 == theirs.address % 4096 == 0
    assert ours.num_bytes == layout.total_bytes
    ctypes.memmove(ours.address + 7 * layout.slot_bytes, theirs.address + 4 * layout.slot_bytes, layout.slot_bytes)
    for to, block in ((0, 5), (1, 2)):
        to_address = decoding.kv_region.address
        from_address = prefill.kv_region.address
        ctypes.memmove(to_address + to * kv.block_bytes, from_address + block * kv.block_bytes, kv.block_bytes)
    order = DigestOrder((5, 2), 31, state_slots=(4,))
    assert prefill.digest(order).result() == decoding.digest(DigestOrder((0, 1), 31, state_slots=(7,))).result()
    arrived = new(0, prompt, (0, 1, 2), slot=7, computed=31, source=7)
    first = list(step(decoding, 0, (0, 1, 1), new=(arrived,)).token_ids)
    assert first + decode(decoding, (0,), NUM_TOKENS - 1)[0] == expected(prompt)


def test_digests_of_a_step_are_those_behind_its_copies(build: Build) -> None:
    model_runner = build()
    orders = (DigestOrder((0,), 16, state_slots=(5,)), DigestOrder((), 0, state_slots=(2, 5)))
    output = step(
        model_runner,
        0,
        (0, 20, 1),
        new=(new(0, prompt_of(20), (0, 1), slot=2),),
        state_copies=((2, 5),),
        digests=orders,
    )
    (block, copied), (own, again) = output.digests
    assert copied == own == again != block
    assert model_runner.digest(DigestOrder((0,), 16, state_slots=(5, 3))).result()[:2] == (block, copied)
    decode(model_runner, (0,), 1)
    assert model_runner.digest(DigestOrder((), 0, state_slots=(2, 5))).result() != (own, copied)


@pytest.mark.parametrize("version", ["V1", pytest.param("V2", marks=pytest.mark.slow)])
def test_turns_over_one_prefix_continue_from_snapshots(
    version: str, checkpoint: Path, expected: Callable[[list[int]], list[int]]
) -> None:
    """The scheduler takes snapshots and finds them: turns of a dialogue, each with a branch that leaves it early."""
    numbers = random.Random(4)
    turn = prompt_of(50)
    prompts = []
    for _ in range(4):
        branch = turn[:35] + [numbers.randrange(128) for _ in range(7)]
        prompts += [turn, branch]
        turn = turn + expected(turn) + [numbers.randrange(128) for _ in range(6)]
    backend = {"V1": "torch", "V2": "triton"}[version]
    options: dict[str, Any] = {"attention_backend": backend, "device": "cpu" if version == "V1" else DEVICE}
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_batch_tokens": 24, "max_model_len": 160, "num_blocks": 40}
    config = node_config(checkpoint, runner=version, **options, **limits)
    rank = Rank(runner.build(config, lambda stage, fraction: None), NullConnector(ConnectorSetup()))
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = generate(rank, config, [Request(tuple(prompt), greedy) for prompt in prompts], at_once=1)
    answers = [[sample.token_id for sample in outputs[number, 0]] for number in range(len(prompts))]
    assert answers == [expected(prompt) for prompt in prompts]


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_warm_up_has_no_effect(build: Build, checkpoint: Path, expected: Callable[[list[int]], list[int]]) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_batch_tokens": 20, "max_model_len": 64, "num_blocks": 12}
    model_runner = build(**limits, state_slots=2)
    config = node_config(checkpoint, **limits)
    run_largest_steps(model_runner, config)
    run_small_steps(model_runner, config)
    run_mixed_steps(model_runner, config)
    (sequence,) = Stepper(model_runner).generate([prompt_of(12)], NUM_TOKENS)
    assert sequence.output == expected(prompt_of(12))


@pytest.mark.parametrize("build", ["V1", pytest.param("V2", marks=pytest.mark.slow)], indirect=True)
def test_preempted_sequences_continue_with_the_same_tokens(
    build: Build, expected: Callable[[list[int]], list[int]]
) -> None:
    stepper = Stepper(build())
    seq = stepper.add(prompt_of(14))
    for at in (1, 2, NUM_TOKENS):
        while len(stepper.live[seq].output) < at:
            stepper.step(chunk=11)
        seq = stepper.preempt(seq)
    assert stepper.live[seq].output == expected(prompt_of(14))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("count", [1, 3])
def test_few_tokens_of_prompts_in_a_graph_yield_what_they_do_outside(checkpoint: Path, count: int) -> None:
    """Chunks of four tokens, as behind a handoff; then decodes, beside padding."""
    config = node_config(checkpoint, runner="V2", attention_backend="triton", device="cuda")
    prompts = [prompt_of(13 + 5 * seed, seed) for seed in range(count)]
    outputs = []
    for graphs in (True, False):
        built = runner.build(msgspec.structs.replace(config, cuda_graphs=graphs), lambda stage, fraction: None)
        assert not built.launches_by_layer(StepPlan(0, scheduled=(ScheduledSequence(0, 4, 1),)))
        outputs.append([sequence.output for sequence in Stepper(built).generate(prompts, 8, chunk=4)])
        built.close()
    assert outputs[0] == outputs[1]
