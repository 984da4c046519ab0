"""Logits and greedy tokens in float32 against transformers, for every family, rope variant and way to cut the work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from stepper import Stepper

import runner
from pdserve.protocols import ModelRunner
from pdserve.records import SamplingParams

NUM_TOKENS = 6
VOCAB = 128

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name → (family, fields of its config, (block_size, kernel_block_size), prompt lengths)
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int], tuple[int, ...]]] = {
    "llama": ("llama", {}, (16, 16), (1, 15, 16, 17, 1500)),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, (48, 16), (1, 47, 48, 49)),
    "llama-mha-biases": (
        "llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        (16, 8),
        (3, 40),
    ),
    "llama-head-dim": ("llama", {"head_dim": 24}, (16, 16), (33,)),
    "llama-sharded": ("llama", {"max_shard_size": "60KB"}, (16, 16), (20,)),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
        (16, 16),
        (90,),
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 512}, (16, 16), (20, 300)),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8, "beta_fast": 16.0, "truncate": False}},
        (16, 16),
        (130,),
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 64},
        (16, 16),
        (64, 20, 65, 200, 20, 62),  # transformers keeps frequencies from call to call; a short prompt resets them
    ),
    "mistral": ("mistral", {}, (16, 16), (1, 17)),
    "mistral-window": ("mistral", {"sliding_window": 20}, (16, 16), (1, 19, 20, 21, 36, 1500)),
    "mistral-window-pages": ("mistral", {"sliding_window": 50}, (48, 16), (47, 48, 49, 150)),
    "qwen3": ("qwen3", {}, (16, 16), (1, 15, 16, 17, 1500)),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}, (48, 48), (47, 48, 49)),
    "qwen3-some-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        (16, 16),
        (23, 24, 25, 300),
    ),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 256}, (16, 16), (30, 240)),
    "qwen3-yarn-attention-factor": (
        "qwen3",
        {"rope_parameters": {**YARN, "attention_factor": 0.7}, "max_position_embeddings": 256},
        (16, 16),
        (100,),
    ),
}


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def build() -> Callable[..., ModelRunner]:
    def make(directory: Path, **options: Any) -> ModelRunner:
        return runner.build(node_config(directory, num_blocks=200, **options), lambda stage, fraction: None)

    return make


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_transformers(
    case: str, tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    family, overrides, (block_size, page), lengths = CASES[case]
    directory = make_checkpoint(tmp_path / "model", family, **overrides)
    reference = reference_model(directory)
    prompts = prompts_of(lengths)
    expected = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    options = {"block_size": block_size, "kernel_block_size": page}

    whole = Stepper(build(directory, **options)).generate(
        prompts, NUM_TOKENS, SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCAB)
    )
    assert [sequence.output for sequence in whole] == expected
    if "dynamic" not in case:  # there a forward pass over all tokens at once is another function
        for sequence in whole:
            assert_logprobs(sequence.samples, reference, sequence.tokens, sequence.prompt_len)

    chunked = Stepper(build(directory, **options), seed=1).generate(prompts, NUM_TOKENS, chunk=37, stagger=2)
    assert [sequence.output for sequence in chunked] == expected


def assert_logprobs(samples: list[Any], reference: Any, tokens: list[int], prompt_len: int) -> None:
    with torch.inference_mode():
        logprobs = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for offset, sample in enumerate(samples):
        row = logprobs[prompt_len - 1 + offset]
        ours = torch.empty(VOCAB)
        ours[list(sample.logprobs.top_ids)] = torch.tensor(sample.logprobs.top_logprobs)
        torch.testing.assert_close(ours, row, atol=2e-4, rtol=1e-4)
        assert sample.logprobs.logprob == pytest.approx(row[sample.token_id].item(), abs=2e-4)


def test_sixteen_requests_at_once(tmp_path: Path, build: Callable[..., ModelRunner]) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    reference = reference_model(directory)
    prompts = prompts_of(tuple(random.Random(3).randrange(1, 120) for _ in range(16)))
    results = Stepper(build(directory, max_num_seqs=4)).generate(prompts, 12, chunk=32, stagger=1)
    assert [r.output for r in results] == [reference_greedy(reference, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("mistral", {"sliding_window": 20}), ("qwen3", {"num_key_value_heads": 1})]
)
def test_triton_kernels_give_the_same_tokens(
    family: str, overrides: dict[str, Any], tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    directory = make_checkpoint(tmp_path / "model", family, num_hidden_layers=2, **overrides)
    reference = reference_model(directory)
    prompts = prompts_of((1, 17, 40))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stepper = Stepper(build(directory, attention_backend="triton", device=device))
    results = stepper.generate(prompts, NUM_TOKENS, chunk=30, stagger=1)
    assert [r.output for r in results] == [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_stays_close_to_float32(
    native: bool, tmp_path: Path, build: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Computing in bfloat16, as on CPUs that can, and in float32 as on others; oneDNN emulates what is not there.
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: native)
    directory = make_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    reference = reference_model(directory, "float32")
    prompt = prompts_of((70,))[0]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCAB)
    (result,) = Stepper(build(directory, dtype="bfloat16")).generate([prompt], 4, sampling)
    with torch.inference_mode():
        exact = reference(torch.tensor([result.tokens])).logits[0, 69:-1].log_softmax(-1)
        rounded = reference_model(directory, "bfloat16")(torch.tensor([result.tokens])).logits[0, 69:-1]
    ours = torch.empty_like(exact)
    for row, sample in zip(ours, result.samples, strict=True):
        assert sample.logprobs is not None
        row[list(sample.logprobs.top_ids)] = torch.tensor(sample.logprobs.top_logprobs)
    assert (ours - exact).abs().mean() <= 1.2 * (rounded.float().log_softmax(-1) - exact).abs().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_cuda_gives_the_same_tokens(family: str, tmp_path: Path, build: Callable[..., ModelRunner]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    directory = make_checkpoint(tmp_path / "model", family)
    reference = reference_model(directory)
    prompts = prompts_of((1, 16, 17, 300))
    results = Stepper(build(directory, device="cuda")).generate(prompts, NUM_TOKENS, chunk=37, stagger=1)
    assert [r.output for r in results] == [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
