"""The sampler against a plain, slow one that follows the documented formulas."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from fast_set import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.ranges import ranges_of
from pdserve.sampling_params import SamplingParams
from runner.sampling.noise import gumbel_noise, row_keys
from runner.sampling.sampler import HostSamplingRow, Sampler
from runner.v2.sampling_metadata import DeviceSamplingRow, MetadataBuilder
from runner.warmup import DEMANDING

VOCAB = 40
EOS = (2, 5)
M32 = (1 << 32) - 1
M64 = (1 << 64) - 1


def plain_mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def plain_gumbel(seed: int, choice: int, position: int, token: int) -> float:
    key = plain_mix64((seed + 0x9E3779B97F4A7C15) & M64) ^ choice
    key = plain_mix64(plain_mix64(key) ^ position)
    x = ((token * 0x9E3779B9) & M32) ^ (key & M32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x ^= key >> 32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    x ^= x >> 16
    return -math.log(-math.log(((x >> 9) + 0.5) / 2**23))


def plain_adjust(logits: Sequence[float], p: SamplingParams, tokens: Sequence[int], prompt_len: int) -> list[float]:
    result = [value + p.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    output = list(tokens[prompt_len:])
    for token in range(len(result)):
        if len(output) < p.min_tokens and token in (*EOS, *p.stop_token_ids):
            result[token] = -math.inf
        if token in tokens:
            by = 1 / p.repetition_penalty if result[token] > 0 else p.repetition_penalty
            result[token] *= by
        count = output.count(token)
        result[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return result


def plain_sample(logits: Sequence[float], p: SamplingParams, choice: int, tokens: Sequence[int], prompt: int) -> int:
    adjusted = plain_adjust(logits, p, tokens, prompt)
    if p.temperature == 0:
        return max(range(len(adjusted)), key=lambda t: adjusted[t])
    scaled = [value / p.temperature for value in adjusted]
    kept = sorted(range(len(scaled)), key=lambda t: -scaled[t])
    kept = kept[: p.top_k or len(kept)]
    best = scaled[kept[0]]
    weights = {t: math.exp(scaled[t] - best) for t in kept}
    nucleus: list[int] = []
    total = sum(weights.values())
    before = 0.0
    for token in kept:
        if p.top_p < 1 and before >= p.top_p and nucleus:
            break
        nucleus.append(token)
        before += weights[token] / total
    allowed = [t for t in nucleus if weights[t] >= p.min_p * weights[kept[0]]]
    return max(allowed, key=lambda t: scaled[t] + plain_gumbel(p.seed, choice, len(tokens), t))


params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 17, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    seed=st.integers(0, M64),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20, width=32), max_size=3),
    stop_token_ids=st.sampled_from([(), (7,), (1, 2)]),
    logprobs=st.sampled_from([-1, 0, 4]),
    logprob_token_ids=st.sampled_from([(), (), (5,), (7, 3, 11, 0, 2)]),
)
rows = st.lists(
    st.tuples(params, st.integers(0, 3), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batch=rows, numbers=st.integers(0, 1 << 30))
def test_tokens_equal_those_of_the_plain_sampler(
    batch: list[tuple[SamplingParams, int, list[int]]], numbers: int
) -> None:
    logits = 3 * torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(numbers))
    untouched = logits.clone()
    sampler = Sampler(VOCAB, EOS, torch.device("cpu"))
    token_ids, logprobs = sampler.sample(
        logits,
        [
            HostSamplingRow(i, p, choice, np.array(tokens, np.int32), (len(tokens) + 1) // 2)
            for i, (p, choice, tokens) in enumerate(batch)
        ],
    )
    for i, (row, token_id, (p, choice, tokens)) in enumerate(zip(untouched.tolist(), token_ids, batch, strict=True)):
        assert token_id == plain_sample(row, p, choice, tokens, (len(tokens) + 1) // 2)
        if p.logprobs < 0:
            assert i not in logprobs
            continue
        expected = torch.tensor(row).log_softmax(-1)
        assert logprobs[i].logprob == pytest.approx(expected[token_id].item(), abs=1e-4)
        top_ids = list(p.logprob_token_ids) or expected.topk(p.logprobs).indices.tolist()
        assert list(logprobs[i].top_ids) == top_ids
        assert logprobs[i].top_logprobs == pytest.approx(expected[top_ids].tolist(), abs=1e-4)


def draw(logits: torch.Tensor, sampling: list[SamplingParams], **row: Any) -> list[int]:
    """One token per sampling, all from the same logits [vocab]."""
    sampler = Sampler(len(logits), (), torch.device("cpu"))
    tokens = row.get("tokens", np.array([1], np.int32))
    batch = [HostSamplingRow(0, s, row.get("choice", 0), tokens, len(tokens)) for s in sampling]
    return list(sampler.sample(logits[None], batch)[0])


@examples(60)
@given(seed=st.integers(0, M64), choice=st.integers(0, 100), position=st.integers(0, 1 << 20))
def test_noise_follows_the_documented_formula(seed: int, choice: int, position: int) -> None:
    tokens = [0, 1, 12_345, 151_935]
    noise = gumbel_noise(row_keys([seed], [choice], [position]), torch.tensor(tokens, dtype=torch.int32))
    expected = [plain_gumbel(seed, choice, position, token) for token in tokens]
    assert noise[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_token_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    count = 20_000
    tokens = draw(logits, [SamplingParams(1, seed=seed) for seed in range(count)])
    observed = np.bincount(tokens, minlength=5) / count
    assert observed == pytest.approx(logits.softmax(-1).numpy(), abs=0.015)


@pytest.mark.parametrize("name", ["seed", "choice", "position"])
def test_noise_differs_for_every_seed_choice_and_position(name: str) -> None:
    keys: dict[str, list[int]] = {"seed": [5] * 100, "choice": [0] * 100, "position": [9] * 100, name: list(range(100))}
    noise = gumbel_noise(row_keys(keys["seed"], keys["choice"], keys["position"]), torch.arange(50, dtype=torch.int32))
    correlation = torch.corrcoef(noise)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 0.75
    assert correlation.mean().abs() < 0.01


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (1500, 1.0), (1500, 0.97), (20, 0.9), (0, 0.05)])
def test_truncation_is_right_for_flat_and_peaked_logits_of_a_large_vocabulary(top_k: int, top_p: float) -> None:
    numbers = torch.Generator().manual_seed(4)
    for scale in (0.1, 8.0):  # flat: more tokens survive than are sorted at first
        logits = scale * torch.randn(5000, generator=numbers)
        sampling = [SamplingParams(1, seed=seed, top_k=top_k, top_p=top_p) for seed in range(40)]
        expected = [plain_sample(logits.tolist(), s, 0, [1], 1) for s in sampling]
        assert draw(logits, sampling) == expected


def test_extreme_values_give_the_best_token() -> None:
    logits = torch.tensor([1e4, -1e4, 9e3, -torch.inf])
    assert draw(logits, [SamplingParams(1, temperature=1e-30), SamplingParams(1, top_p=1e-9)]) == [0, 0]
    assert draw(logits, [SamplingParams(1, min_p=1.0), SamplingParams(1, top_k=10**9)]) == [0, 0]


#: Parameters that act before or after the sampler: in masks, at the end of a choice, for the prompt.
ELSEWHERE = {
    *("n", "max_tokens", "ignore_eos", "prompt_logprobs", "grammar", "allowed_token_ids", "bad_words"),
    *("thinking_token_budget", "thinking_start_ids", "thinking_end_ids", "thinking_call_ids"),
    *("disable_spec_decode", "adapter"),
}


class ReadParams:
    """Sampling parameters that record which of their fields are read."""

    def __init__(self, params: SamplingParams, read: set[str]) -> None:
        self.params = params
        self.read = read

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.params, name)


def test_both_samplers_read_every_parameter() -> None:
    params = msgspec.structs.replace(DEMANDING, logprob_token_ids=(1,))
    host = set[str]()
    device = set[str]()
    tokens = np.array([3], np.int32)
    row = HostSamplingRow(0, cast(SamplingParams, ReadParams(params, host)), 0, tokens, 1)
    Sampler(VOCAB, EOS, torch.device("cpu")).sample(torch.zeros(1, VOCAB), [row])
    builder = MetadataBuilder(VOCAB, EOS, torch.device("cpu"))
    for sampling in (params, msgspec.structs.replace(params, grammar="")):  # a mask respects min_tokens
        builder.build([DeviceSamplingRow(0, 0, cast(SamplingParams, ReadParams(sampling, device)), 0, 1)])
    fields = {*SamplingParams.__struct_fields__} - ELSEWHERE
    assert fields <= host
    assert fields <= device


def test_every_number_has_a_range() -> None:
    hints = typing.get_type_hints(SamplingParams)
    numbers = {name for name, kind in hints.items() if kind in (int, float, dict[int, float])}
    assert numbers == {*ranges_of(SamplingParams), "seed"}
