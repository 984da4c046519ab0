"""V2 alone launches a step before the tokens of the last one are known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, node_config
from stepper import GREEDY, Stepper

import runner
from pdserve.protocols import ModelRunner, PendingStep
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange
from runner.v2.sampling_metadata import DeviceSamplingRow, MetadataBuilder, SamplingMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


def build(checkpoint: Path, version: str = "V2", max_num_seqs: int = 8) -> ModelRunner:
    backend, device = ("triton", DEVICE) if version == "V2" else ("torch", "cpu")
    config = node_config(
        checkpoint, runner=version, attention_backend=backend, device=device, max_num_seqs=max_num_seqs
    )
    return runner.build(config, lambda stage, fraction: None)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(128), k=length))


def reference(checkpoint: Path, prompt: tuple[int, ...], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    (sequence,) = Stepper(build(checkpoint, "V1")).generate([prompt], count, sampling)
    return sequence.output[:count]


class Overlapped:
    """Launches steps of at most one sample per sequence, and takes a result once ``max_in_flight`` are in flight."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.runner = model_runner
        self.outputs: dict[int, list[int]] = {}
        self._pending: deque[tuple[list[int], PendingStep]] = deque()  # sequences that sample in it
        self._step = 0

    def launch(
        self,
        scheduled: Sequence[ScheduledSequence],
        new: Sequence[NewSequence] = (),
        finished: Sequence[int] = (),
    ) -> None:
        plan = StepPlan(self._step, tuple(finished), tuple(new), tuple(scheduled))
        self._pending.append(([item.seq for item in scheduled if item.num_samples], self.runner.launch(plan)))
        self._step += 1
        if len(self._pending) == self.runner.max_in_flight:
            self.take()

    def take(self) -> None:
        seqs, step = self._pending.popleft()
        for seq, token_id in zip(seqs, step.result().token_ids, strict=True):
            self.outputs.setdefault(seq, []).append(token_id)

    def drain(self) -> None:
        while self._pending:
            self.take()


def new_sequence(seq: int, prompt: tuple[int, ...], first_block: int, sampling: SamplingParams = GREEDY) -> NewSequence:
    blocks = tuple(range(first_block, first_block + (len(prompt) + 24) // BLOCK + 1))
    return NewSequence(seq, pack_tokens(prompt), len(prompt), 0, blocks, sampling)


def one(seq: int) -> ScheduledSequence:
    return ScheduledSequence.decode(seq)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, marks=pytest.mark.slow),
        SamplingParams(1, temperature=1.2, seed=5, top_k=40, frequency_penalty=0.4, min_tokens=3),
    ],
)
def test_a_step_continues_with_tokens_that_the_host_has_not_seen(checkpoint: Path, sampling: SamplingParams) -> None:
    prompts = [prompt_of(length, length) for length in (5, 16, 18)]
    steps = Overlapped(build(checkpoint))
    steps.launch(
        [ScheduledSequence(seq, len(prompt), 1) for seq, prompt in enumerate(prompts)],
        new=[new_sequence(seq, prompt, 10 * seq, sampling) for seq, prompt in enumerate(prompts)],
    )
    for _ in range(5):
        steps.launch([one(seq) for seq in range(3)])
    steps.drain()
    for seq, prompt in enumerate(prompts):
        assert steps.outputs[seq] == reference(checkpoint, prompt, 6, sampling)


def test_a_slot_is_reused_while_the_last_step_of_its_sequence_is_in_flight(checkpoint: Path) -> None:
    """The next sequence gets the only slot at once, and neither sequence gets tokens of the other."""
    steps = Overlapped(build(checkpoint, max_num_seqs=1))
    old = prompt_of(20, 1)
    new = prompt_of(7, 2)
    steps.launch([ScheduledSequence(0, len(old), 1)], new=[new_sequence(0, old, 0)])
    for _ in range(3):
        steps.launch([one(0)])
    steps.launch([ScheduledSequence(1, len(new), 1)], new=[new_sequence(1, new, 10)], finished=[0])
    for _ in range(5):
        steps.launch([one(1)])
    steps.drain()
    assert steps.outputs[0] == reference(checkpoint, old, 4)
    assert steps.outputs[1] == reference(checkpoint, new, 6)


def test_a_prompt_joins_a_decoding_batch(checkpoint: Path) -> None:
    steps = Overlapped(build(checkpoint))
    first = prompt_of(20, 1)
    second = prompt_of(25, 2)
    steps.launch([ScheduledSequence(0, 20, 1)], new=[new_sequence(0, first, 0)])
    steps.launch([one(0), ScheduledSequence(1, 15, 0)], new=[new_sequence(1, second, 10)])
    steps.launch([one(0), ScheduledSequence(1, 10, 1)])
    for _ in range(4):
        steps.launch([one(1), one(0)])
    steps.drain()
    assert steps.outputs[0] == reference(checkpoint, first, 7)
    assert steps.outputs[1] == reference(checkpoint, second, 5)


def test_decode_batches_are_kept_between_chunks_of_a_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling parameters of the decode batch are copied to the device once, while it alternates with chunks."""
    copied: list[int] = []
    copy = MetadataBuilder.build

    def build_counted(builder: MetadataBuilder, rows: Sequence[DeviceSamplingRow]) -> SamplingMetadata:
        copied.append(len(rows))
        return copy(builder, rows)

    monkeypatch.setattr(MetadataBuilder, "build", build_counted)
    steps = Overlapped(build(checkpoint))
    copied.clear()
    prompts = prompt_of(20, 1), prompt_of(7, 2), prompt_of(25, 3)
    streams = [one(0), one(1)]
    chunks = (9, 6, 10)
    steps.launch(
        [ScheduledSequence(seq, len(prompts[seq]), 1) for seq in range(2)],
        new=[new_sequence(seq, prompts[seq], 10 * seq) for seq in range(2)],
    )
    for number, chunk in enumerate(chunks):
        new = [] if number else [new_sequence(2, prompts[2], 20)]
        steps.launch([*streams, ScheduledSequence(2, chunk, int(number == 2))], new=new)
        steps.launch(streams)
    steps.drain()
    for seq, count in enumerate((7, 7, 1)):
        assert steps.outputs[seq] == reference(checkpoint, prompts[seq], count)
    assert copied == [2, 2, 2, 2, 3], "the first prompts, a chunk, the decode batch, and two chunks"


def test_a_chunk_of_one_token_that_samples_nothing_leaves_other_rows_alone(checkpoint: Path) -> None:
    """With one token per sequence, a decode graph fits on a GPU; its logits also have a row for the chunk."""
    steps = Overlapped(build(checkpoint))
    first = prompt_of(20, 1)
    second = prompt_of(12, 2)
    steps.launch([ScheduledSequence(0, 20, 1)], new=[new_sequence(0, first, 0)])
    steps.launch([ScheduledSequence(1, 1, 0), one(0)], new=[new_sequence(1, second, 10)])
    steps.launch([ScheduledSequence(1, 11, 1), one(0)])
    steps.launch([one(1), one(0)])
    steps.drain()
    assert steps.outputs[0] == reference(checkpoint, first, 4)
    assert steps.outputs[1] == reference(checkpoint, second, 2)


@pytest.mark.parametrize("requested", [(), (7, 3, 11)])
def test_logprobs_equal_those_of_v1(checkpoint: Path, requested: tuple[int, ...]) -> None:
    sampling = SamplingParams(1, temperature=0.0, logprobs=4, logprob_token_ids=requested)
    prompt = prompt_of(9, 3)
    (ours,) = Stepper(build(checkpoint)).generate([prompt], 5, sampling)
    (theirs,) = Stepper(build(checkpoint, "V1")).generate([prompt], 5, sampling)
    for a, b in zip(ours.samples, theirs.samples, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert a.logprobs.top_ids == b.logprobs.top_ids
        assert a.logprobs.top_ids == requested or not requested
        assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-5)
        assert a.logprobs.top_logprobs == pytest.approx(b.logprobs.top_logprobs, abs=1e-5)


def test_reloaded_weights_give_their_own_tokens(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=1, num_hidden_layers=1)
    prompt = prompt_of(12, 4)
    expected = reference(other, prompt, 6)
    for version in ("V1", "V2"):
        model_runner = build(checkpoint, version)
        assert Stepper(model_runner).generate([prompt], 6)[0].output[:6] != expected
        model_runner.change_weights(WeightChange(str(other)))
        stepper = Stepper(model_runner)
        stepper._next = 100  # the runner has seen the others
        assert stepper.generate([prompt], 6)[0].output[:6] == expected
