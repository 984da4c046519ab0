"""Drafts change no answer: tokens, reasons and log-probabilities are those of a node without drafts.

python -m pytest -m slow tests/runner/test_verification.py     runner V2, in Triton's interpreter where there is no GPU
python -m pytest -m gpu tests/runner/test_verification.py      CUDA graphs
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from drafted_node import Answers, DraftedNode, Oracle
from fast_set import examples, sampled
from fleet import add_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.draft_planner import SyntheticDrafts
from engine.speculation.draft_source import DraftSource
from engine.speculation.prompt_lookup import PromptLookup
from pdserve.grammar import from_regex
from pdserve.records import FinishReason
from pdserve.sampling_params import SamplingParams
from runner.simulated import acceptance_rate

VOCAB = 128
Request = tuple[list[int], SamplingParams]
Source = Callable[[], DraftSource]
Config = Callable[..., Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs V2's kernels


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def answers_of(config: Any, requests: Sequence[Request], drafts: int = 0, source: Source | None = None) -> Answers:
    return run(DraftedNode(config, drafts, source), requests)


def run(node: DraftedNode, requests: Sequence[Request]) -> Answers:
    for rid, (prompt, sampling) in enumerate(requests):
        node.submit(rid, prompt, sampling)
    node.run()
    node.close()
    assert not node.num_refused
    return node.answers


def oracle(requests: Sequence[Request], answers: Answers, wrong: float, seed: int = 0) -> Source:
    """Return a source that knows the answers."""
    texts = [requests[rid][0] + answer.token_ids for (rid, _), answer in answers.items()]
    numbers = iter(range(seed, seed + 10**6))
    return lambda: Oracle(texts, wrong, VOCAB, next(numbers))


def check(actual: Answers, expected: Answers) -> None:
    assert actual.keys() == expected.keys()
    for key, answer in expected.items():
        ours = actual[key]
        assert (ours.token_ids, ours.finish) == (answer.token_ids, answer.finish), f"request and choice {key}"
        for a, b in zip(ours.logprobs, answer.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.top_ids == b.top_ids
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


def config_of(checkpoint: Path, version: str) -> Config:
    options: dict[str, Any] = {"attention_backend": "triton", "device": DEVICE} if version == "V2" else {}
    return functools.partial(node_config, checkpoint, runner=version, **options)


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, checkpoint: Path) -> Config:
    return config_of(checkpoint, request.param)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Return parameters of any kind but grammars."""
    some = functools.partial(st.sampled_from)
    return SamplingParams(
        max_tokens=draw(st.integers(1, 30)),
        min_tokens=draw(st.integers(0, 12)),
        n=draw(some([1, 1, 2, 3])),
        temperature=draw(some([0.0, 0.0, 0.6, 1.2])),
        seed=draw(st.integers(0, 99)),
        top_k=draw(some([0, 0, 5])),
        top_p=draw(some([1.0, 1.0, 0.8])),
        min_p=draw(some([0.0, 0.0, 0.1])),
        presence_penalty=draw(some([0.0, 0.7])),
        frequency_penalty=draw(some([0.0, 0.4])),
        repetition_penalty=draw(some([1.0, 1.3])),
        logit_bias=draw(some([{}, {5: 3.0, 9: -4.0}])),
        stop_token_ids=draw(some([(), tuple(range(3, 20))])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(some([-1, -1, 0, 3])),
        allowed_token_ids=draw(some([(), (), tuple(range(30, 90))])),
        bad_words=draw(some([(), ((40,), (41, 42))])),
    )


requests_of = st.lists(
    st.tuples(st.integers(1, 60).map(lambda length: prompt_of(length, length)), sampling_params()),
    min_size=1,
    max_size=6,
)


cases = given(requests=requests_of, drafts=st.integers(1, 5), wrong=st.sampled_from([0.0, 0.2, 0.6, 1.0]))


@cases
@examples(25)
def test_answers_are_those_without_drafts(checkpoint: Path, requests: list[Request], drafts: int, wrong: float) -> None:
    check_answers(config_of(checkpoint, "V1"), requests, drafts, wrong)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@cases
@examples(8)
def test_answers_are_those_without_drafts_on_v2(
    checkpoint: Path, requests: list[Request], drafts: int, wrong: float
) -> None:
    """The expected ones are V1's."""
    check_answers(config_of(checkpoint, "V2"), requests, drafts, wrong, config_of(checkpoint, "V1"))


def check_answers(
    config: Config, requests: list[Request], drafts: int, wrong: float, reference: Config | None = None
) -> None:
    """Also with too few blocks, so that sequences are preempted, and with chunks of prompts beside decodes."""
    expected = answers_of((reference or config)(), requests)
    check(answers_of(config(), requests, drafts, oracle(requests, expected, wrong)), expected)
    tight = config(num_blocks=14, max_num_seqs=4, max_batch_tokens=24)
    check(answers_of(tight, requests, drafts, oracle(requests, expected, wrong)), expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 20},
    "llama": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "glm4_moe": {},
    "minimax_m2": {},
    "deepseek_v3": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "lfm2": {},
    "granitemoehybrid": {},
    "nemotron_h": {"hybrid_override_pattern": "MEM*-"},
    "falcon_h1": {},
}


@pytest.mark.parametrize(
    ("family", "version"),
    [
        *sampled(FAMILIES, ["V1"], every=2),
        *(pytest.param(family, "V2", marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_answers_of_every_family_are_those_without_drafts(family: str, version: str, tmp_path: Path) -> None:
    """Windows end among drafts."""
    checkpoint = make_checkpoint(tmp_path, family, **FAMILIES[family])
    sampling = SamplingParams(24, temperature=0.8, presence_penalty=0.3, logprobs=2)
    requests = [(prompt_of(13 + 9 * seed, seed), msgspec.structs.replace(sampling, seed=seed)) for seed in range(3)]
    check_answers(config_of(checkpoint, version), requests, 3, 0.2, config_of(checkpoint, "V1"))


def test_v2_verifies_drafts(checkpoint: Path) -> None:
    """Sampled, with a penalty, beside a prompt, and with log-probabilities."""
    sampling = SamplingParams(12, temperature=0.9, ignore_eos=True, frequency_penalty=0.4, min_tokens=5, logprobs=2)
    requests = [(prompt_of(9 + 20 * seed, seed), msgspec.structs.replace(sampling, seed=seed)) for seed in range(2)]
    expected = answers_of(config_of(checkpoint, "V1")(), requests)
    node = DraftedNode(config_of(checkpoint, "V2")(max_batch_tokens=300), 3, oracle(requests, expected, wrong=0.2))
    check(run(node, requests), expected)
    assert node.num_accepted > 5


def test_right_drafts_save_steps(config: Config) -> None:
    requests = [
        (prompt_of(20, seed), SamplingParams(40, temperature=0.9, seed=seed, ignore_eos=True)) for seed in range(3)
    ]
    expected = answers_of(config(), requests)
    node = DraftedNode(config(), 3, oracle(requests, expected, wrong=0.0))
    check(run(node, requests), expected)
    assert node.num_accepted == 3 * 29
    assert len([plan for plan in node.plans if plan.num_decodes]) == 10


def test_a_stop_token_among_accepted_drafts_ends_the_answer(config: Config) -> None:
    """Whatever its place in the run of accepted tokens."""
    prompt = prompt_of(20)
    plain = SamplingParams(30, temperature=0.8, seed=5, ignore_eos=True)
    ((_, whole),) = answers_of(config(), [(prompt, plain)]).items()
    first = [at for at, token in enumerate(whole.token_ids) if token not in whole.token_ids[:at]]
    for at in first[3:9]:
        stop = whole.token_ids[at]
        sampling = SamplingParams(30, temperature=0.8, seed=5, ignore_eos=True, stop_token_ids=(stop,))
        expected = answers_of(config(), [(prompt, sampling)])
        assert expected[0, 0].finish is FinishReason.STOP
        source = functools.partial(Oracle, [prompt + whole.token_ids], 0.0, VOCAB)
        check(answers_of(config(), [(prompt, sampling)], 4, source), expected)


def test_rejected_drafts_are_not_in_the_prefix_cache(config: Config) -> None:
    """Prompts that continue earlier answers, and prompts that continue rejected drafts."""
    prompt = prompt_of(30)
    requests = [(prompt, SamplingParams(40, temperature=1.0, seed=1, ignore_eos=True))]
    expected = answers_of(config(), requests)
    source = oracle(requests, expected, wrong=0.4)()
    assert isinstance(source, Oracle)
    node = DraftedNode(config(), 4, lambda: source)
    node.submit(0, *requests[0])
    node.run()
    assert 0 < node.num_accepted < node.num_drafts
    texts = [prompt + node.answers[0, 0].token_ids, *source.proposed]
    longer = [(text, SamplingParams(5, temperature=0.0, logprobs=2)) for text in texts]
    off = answers_of(config(), longer)
    for rid, (text, sampling) in enumerate(longer, 1):
        node.submit(rid, text, sampling)
    answers = node.run()
    check({(rid, 0): answers[rid + 1, 0] for rid in range(len(texts))}, off)
    assert node.scheduler.totals.prefix_cached_tokens > 0


@pytest.mark.parametrize("version", ["V1", pytest.param("V2", marks=pytest.mark.slow)])
def test_structured_outputs_have_drafts(tmp_path: Path, version: str) -> None:
    """Each position has the mask of the grammar there, also where drafts leave it, and before ``min_tokens``."""
    checkpoint = add_tokenizer(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, vocab_size=4096))
    config = config_of(checkpoint, version)
    grammars = ("[a-z ]{5,60}", "([0-9]{1,3}[.]){3}[0-9]{1,3}", "(river|bridge|river bank|brook)", "a{3,9}b{0,4}c+")
    sampling = [
        SamplingParams(
            40, temperature=0.8, seed=seed, grammar=from_regex(regex), min_tokens=4 * (seed % 2), n=1 + seed % 2
        )
        for seed, regex in enumerate(grammars)
    ]
    sampling.append(SamplingParams(20, temperature=0.8, seed=9, allowed_token_ids=tuple(range(10, 40))))
    sampling.append(SamplingParams(20, grammar=from_regex("[a-z ]{9,60}"), allowed_token_ids=tuple(range(10, 90))))
    requests = [(prompt_of(20, rid), params) for rid, params in enumerate(sampling)]
    expected = answers_of(config_of(checkpoint, "V1")(), requests)
    for wrong in (0.0, 0.3, 1.0):
        node = DraftedNode(config(), 3, oracle(requests, expected, wrong))
        check(run(node, requests), expected)
        masked = {(mask.seq, mask.drafts_before) for plan in node.plans for mask in plan.masks}
        assert any(before for _, before in masked)
        assert node.num_accepted > 20 or wrong


def test_answers_are_the_same_where_drafts_come_and_go(config: Config) -> None:
    """Drafts only where they are worth their time; V2 then plans steps ahead, and waits for results before drafts."""
    few = dict.fromkeys((5, 6, 7), 9.0)
    sampling = [SamplingParams(40, temperature=0.9, seed=seed, logit_bias=few if seed % 2 else {}) for seed in range(5)]
    requests = [(prompt_of(20 + rid, rid), params) for rid, params in enumerate(sampling)]
    expected = answers_of(config(), requests)
    check(run(DraftedNode(config(), 3, PromptLookup, always=False), requests), expected)
    check(run(DraftedNode(config(), 3, oracle(requests, expected, wrong=0.3), always=False), requests), expected)


def test_lookup_copies_text(config: Config) -> None:
    """A bias makes the model repeat its prompt's tokens."""
    prompt = [5, 6, 7, 8, 9, 10] * 6
    requests = [(prompt, SamplingParams(40, temperature=0.0, logit_bias=dict.fromkeys((5, 6, 7), 40.0)))]
    expected = answers_of(config(), requests)
    node = DraftedNode(config(), 3, PromptLookup)
    check(run(node, requests), expected)
    assert node.num_accepted > 20


def test_synthetic_acceptance_yields_as_many_tokens_as_wanted(config: Config) -> None:
    """KV and tokens agree: prompts that continue these answers find prefixes, and get the tokens of the model."""
    requests = [(prompt_of(20, rid), SamplingParams(200, temperature=0.0, ignore_eos=True)) for rid in range(4)]
    node = DraftedNode(config(), 3, SyntheticDrafts, synthetic=acceptance_rate(2.5, 3))
    for rid, (prompt, sampling) in enumerate(requests):
        node.submit(rid, prompt, sampling)
    node.run()
    num_decodes = sum(plan.num_decodes for plan in node.plans)
    assert (num_decodes + node.num_accepted) / num_decodes == pytest.approx(2.5, rel=0.1)
    prompt = requests[0][0] + node.answers[0, 0].token_ids[:100]
    plain = SamplingParams(5, temperature=0.0, disable_spec_decode=True)
    node.submit(9, prompt, plain)
    answer = node.run()[9, 0]
    assert node.scheduler.totals.prefix_cached_tokens > 0
    node.close()
    assert answer.token_ids == answers_of(config(), [(prompt, plain)])[0, 0].token_ids


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_decodes_with_drafts_run_as_cuda_graphs(tmp_path: Path, backend: str) -> None:
    """Graphs of rows with as many tokens, of rows with fewer, beside prompts, and no graph; in float32."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2, head_dim=64)  # FlashInfer has no 32
    dtype = "float32" if backend == "triton" else "bfloat16"
    config = functools.partial(
        node_config, checkpoint, runner="V2", device="cuda", attention_backend=backend, dtype=dtype
    )
    some = [SamplingParams(40, temperature=0.0), SamplingParams(40, temperature=0.8, seed=3, presence_penalty=0.4)]
    num_accepted = 0
    for count in (1, 3, 17, 40):
        requests = [(prompt_of(20 + rid, rid), some[rid % 2]) for rid in range(count)]
        expected = answers_of(config(), requests)
        node = DraftedNode(config(), 3, oracle(requests, expected, wrong=0.2))
        answers = run(node, requests)
        num_accepted += node.num_accepted
        if dtype == "float32":  # in 16 bits a step of several tokens rounds differently, and answers may differ
            check(answers, expected)
    assert num_accepted > 0.3 * 40 * (1 + 3 + 17 + 40)
