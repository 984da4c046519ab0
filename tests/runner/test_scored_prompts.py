"""Log-probabilities of prompt tokens are those of transformers, whatever the runner and however prompts are cut."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_model
from hypothesis import given
from hypothesis import strategies as st
from stepper import Stepper
from test_simulated_runner import build as build_simulated

import runner
from pdserve.logprobs import PromptLogprobs
from pdserve.records import NewSequence, ScheduledSequence
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from runner.sampling.prompt_targets import PromptTargets

VOCAB = 128
BLOCK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def params_with(num_top: int) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_top)


def check(checkpoint: Path, prompt: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int) -> None:
    """Check log-probabilities and ranks of all tokens but the first against transformers."""
    with torch.no_grad():
        logits = reference_model(checkpoint)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)
    at = 1
    for part in parts:
        assert (part.first, part.num_top) == (at, num_top)
        for row in struct.iter_unpack(f"<fI{num_top}I{num_top}f", part.table):
            own = row[0]
            rank = row[1]
            ids = row[2 : 2 + num_top]
            values = row[2 + num_top :]
            of_token = expected[at - 1]
            assert own == pytest.approx(of_token[prompt[at]].item(), abs=1e-4)
            best = of_token.topk(max(num_top, 1))
            assert values == pytest.approx(best.values[:num_top].tolist(), abs=1e-4)
            assert [of_token[token].item() for token in ids] == pytest.approx(list(values), abs=1e-4)
            assert rank == 1 + int((of_token > of_token[prompt[at]]).sum())
            if prompt[at] in ids:
                assert own == values[ids.index(prompt[at])]  # bit by bit: clients compare them
            at += 1
    assert at == len(prompt)


@pytest.mark.parametrize(
    ("version", "lengths", "chunk"),
    [("V1", (1, 2, 40, 300), 48), pytest.param("V2", (2, 21, 9), 10, marks=pytest.mark.slow)],
)
def test_prompts_are_scored_in_batches_with_other_sequences(
    checkpoint: Path, version: str, lengths: tuple[int, ...], chunk: int
) -> None:
    """Prompts come in chunks, beside each other, beside prompts without scores and decoding sequences."""
    backend = {"V1": "torch", "V2": "triton"}[version]
    config = node_config(checkpoint, runner=version, attention_backend=backend, max_num_seqs=8)
    stepper = Stepper(runner.build(config, lambda stage, fraction: None))
    decoding = stepper.add(prompt_of(5, 1))
    stepper.step()
    scored = {stepper.add(prompt_of(length), params_with(num_top)): num_top for num_top, length in enumerate(lengths)}
    silent = stepper.add(prompt_of(30, 2))
    while stepper.live[silent].computed < 30 or any(not stepper.live[seq].output for seq in scored):
        stepper.step(chunk)
    for seq, num_top in scored.items():
        sequence = stepper.live[seq]
        check(checkpoint, sequence.tokens[: sequence.prompt_len], stepper.scored.get(seq, []), num_top)
    assert set(stepper.scored) == {seq for seq in scored if stepper.live[seq].prompt_len > 1}
    plain = Stepper(runner.build(config, lambda stage, fraction: None))
    for seq in (decoding, silent):
        sequence = stepper.live[seq]
        count = len(sequence.output)
        (alone,) = plain.generate([sequence.tokens[: sequence.prompt_len]], count)
        assert alone.output == sequence.output


def test_a_simulated_node_scores_prompts() -> None:
    stepper = Stepper(build_simulated())
    prompt = prompt_of(20)
    seq = stepper.add(prompt, params_with(2))
    while not stepper.live[seq].output:
        stepper.step(chunk=6)
    rows = [row for part in stepper.scored[seq] for row in struct.iter_unpack("<fI2I2f", part.table)]
    assert [row[2] for row in rows] == prompt[1:]
    assert all(row[0] == row[4] > row[5] for row in rows)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(1, 20),
    st.integers(0, 4),
)
def test_every_token_is_scored_once(chunks: list[int], num_computed: int, num_scored: int, others: int) -> None:
    """Chunks behind ``num_computed`` tokens score the tokens that they predict and no earlier chunk has scored."""
    end = num_computed + sum(chunks)
    prompt_len = max(1, end - 2)  # the last two have been generated already
    new = NewSequence(7, pack_tokens(range(end)), prompt_len, num_computed, (), params_with(3), num_scored=num_scored)
    targets = PromptTargets()
    targets.add(new)
    targets_seen: list[int] = []
    computed = num_computed
    for chunk in chunks:
        step = (ScheduledSequence(1, others, 1), ScheduledSequence(7, chunk, 0))
        for part in targets.take(step):
            assert [row - others + computed + 1 for row in part.rows] == list(part.token_ids)
            assert part.first == part.token_ids[0]
            targets_seen += part.token_ids
        computed += chunk
    assert targets_seen == list(range(max(num_computed + 1, num_scored), min(end + 1, prompt_len)))
