"""Logits and greedy tokens in float32 against transformers, for every family, rope variant and way to cut the work."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    CONFIG_CLASSES,
    FAMILIES,
    LATENT,
    MAMBA2,
    RECURRENT,
    make_checkpoint,
    node_config,
    reference_greedy,
    reference_model,
)
from fast_set import sampled
from stepper import Running, Stepper
from torch import Tensor

import runner
from pdserve.protocols import ModelRunner
from pdserve.sampling_params import SamplingParams

NUM_TOKENS = 6
VOCAB = 128
WITH_LOGPROBS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCAB)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Head sizes for which FlashInfer has kernels.
PUBLISHED_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

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
    "qwen2": ("qwen2", {}, (16, 16), (1, 15, 16, 17, 1500)),
    "qwen2-tied-windows": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
        (48, 48),
        (23, 24, 25, 300),
    ),
    "qwen3": ("qwen3", {}, (16, 16), (1, 15, 16, 17, 1500)),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}, (48, 48), (47, 48, 49)),
    "qwen3-some-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        (16, 16),
        (23, 24, 25, 300),
    ),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 256}, (16, 16), (30, 240)),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}, (16, 16), (1, 15, 16, 17, 500)),
    "qwen3-moe-some-dense": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 24,
            "fused": True,
        },
        (16, 16),
        (33, 70),
    ),
    "mixtral": ("mixtral", {}, (16, 16), (1, 17, 300)),
    "mixtral-fused": ("mixtral", {"sliding_window": 20, "fused": True}, (48, 16), (47, 90)),
    "gpt-oss": ("gpt_oss", {}, (16, 16), (1, 19, 20, 21, 300)),
    "glm4-moe": ("glm4_moe", {}, (16, 16), (1, 17, 300)),
    "glm4-moe-yarn-fused": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "n_group": 1,
            "topk_group": 1,
            "fused": True,
            "num_mtp_layers": 1,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.25},
            "max_position_embeddings": 256,
        },
        (16, 16),
        (33, 200),
    ),
    "deepseek-v2": ("deepseek_v2", {}, (16, 16), (1, 15, 16, 17, 600)),
    "deepseek-v2-lite-fused": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "fused": True,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            "max_position_embeddings": 256,
        },
        (48, 16),
        (47, 48, 49, 200),
    ),
    "deepseek-v3": ("deepseek_v3", {}, (16, 16), (1, 17, 300)),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "num_mtp_layers": 1,
            "rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
            "max_position_embeddings": 256,
        },
        (16, 8),
        (33, 200),
    ),
    "ministral3": ("ministral3", {}, (16, 16), (1, 15, 16, 17, 100, 300)),
    "ministral3-window": ("ministral3", {"sliding_window": 20, "num_key_value_heads": 1}, (48, 16), (47, 130)),
    "ministral3-without-scale": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}, "max_position_embeddings": 256},
        (16, 16),
        (100,),
    ),
    "mistral4": ("mistral4", {}, (16, 16), (1, 17, 300)),
    "mistral4-one-group": (
        "mistral4",
        {"q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "fused": True},
        (48, 16),
        (47, 130),
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {}, (16, 16), (1, 17, 300)),
    "glm4-moe-lite-dense": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None},
        (16, 16),
        (50,),
    ),
    "minimax-m2": ("minimax_m2", {}, (16, 16), (1, 17, 300)),
    "qwen3-next": ("qwen3_next", {}, (16, 16), (1, 2, 3, 64, 65, 500)),
    "qwen3-next-some-dense": (
        "qwen3_next",
        {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True, "linear_num_value_heads": 2},
        (48, 16),
        (47, 129),
    ),
    "granite-4": ("granitemoehybrid", {}, (16, 16), (1, 2, 3, 64, 65, 500)),
    "granite-4-dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "tie_word_embeddings": True,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "time_step_limit": [0.3, 0.9],
        },
        (48, 16),
        (47, 129),
    ),
    "granite-4-attention": ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}, (16, 16), (17,)),
    "granite-4-fused": ("granitemoehybrid", {"fused": True}, (16, 16), (33,)),
    "nemotron-h": ("nemotron_h", {}, (16, 16), (1, 2, 3, 64, 65, 500)),
    "nemotron-h-dense": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "*M-M",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
            "mamba_head_dim": 12,
        },
        (48, 16),
        (47, 129),
    ),
    "nemotron-h-fused": ("nemotron_h", {"fused": True, "norm_topk_prob": False}, (16, 16), (33,)),
    "falcon-h1": ("falcon_h1", {}, (16, 16), (1, 2, 3, 64, 65, 500)),
    "falcon-h1-norms": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_n_groups": 1, "tie_word_embeddings": True, "projectors_bias": True},
        (48, 16),
        (47, 129),
    ),
    "falcon-h1-norm-behind-gate": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "ssm_in_multiplier": 1.0,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
        },
        (16, 16),
        (33,),
    ),
    "qwen3.5": ("qwen3_5_text", {}, (16, 16), (1, 2, 3, 64, 65, 500)),
    "qwen3.5-tied-heads": (
        "qwen3_5_text",
        {
            "tie_word_embeddings": True,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 2,
        },
        (16, 16),
        (33, 70),
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}, (16, 16), (1, 17, 300)),
    "qwen3.5-moe-fused": ("qwen3_5_moe_text", {"fused": True}, (16, 16), (33, 70)),
    "lfm2": ("lfm2", {}, (16, 16), (1, 2, 3, 64, 65, 500)),
    "lfm2-published": (
        "lfm2",
        {
            "layer_types": None,
            "full_attn_idxs": [1, 3],
            "num_hidden_layers": 5,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32,
            "tie_word_embeddings": True,
        },
        (48, 16),
        (47, 130),
    ),
    "lfm2-bias": ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "num_key_value_heads": 1}, (16, 16), (1, 5, 90)),
    "lfm2-moe": ("lfm2_moe", {}, (16, 16), (1, 2, 17, 300)),
    "lfm2-moe-plain": (
        "lfm2_moe",
        {"fused": True, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
        (16, 16),
        (33, 70),
    ),
    "minimax-m2-fused": ("minimax_m2", {"fused": True, "num_key_value_heads": 1}, (48, 16), (47, 90)),
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


@pytest.mark.parametrize("case", sampled(CASES, every=2))  # test_random_models.py has all families
def test_tokens_and_logprobs_equal_transformers(case: str, tmp_path: Path, build: Callable[..., ModelRunner]) -> None:
    family, overrides, (block_size, page), lengths = CASES[case]
    directory = make_checkpoint(tmp_path / "model", family, **overrides)
    reference = reference_model(directory)
    prompts = prompts_of(lengths)
    expected = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    options = {"block_size": block_size, "kernel_block_size": page}

    whole = Stepper(build(directory, **options)).generate(prompts, NUM_TOKENS, WITH_LOGPROBS)
    assert [sequence.output for sequence in whole] == expected
    if "dynamic" not in case:  # dynamic RoPE: one pass over all tokens is another function
        for sequence in whole:
            ours = logprobs_of(sequence)
            theirs = reference_logprobs(reference, sequence)
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
            chosen = [sample.logprobs.logprob for sample in sequence.samples if sample.logprobs is not None]
            assert chosen == pytest.approx(theirs.gather(1, torch.tensor([sequence.output]).T)[:, 0].tolist(), abs=2e-4)

    chunked = Stepper(build(directory, **options), seed=1).generate(prompts, NUM_TOKENS, chunk=37, stagger=2)
    assert [sequence.output for sequence in chunked] == expected


def logprobs_of(sequence: Running) -> Tensor:
    """Return the log-probabilities [outputs, VOCAB] of a sequence that requested all."""
    rows = torch.empty(len(sequence.samples), VOCAB)
    for row, sample in zip(rows, sequence.samples, strict=True):
        assert sample.logprobs is not None
        row[list(sample.logprobs.top_ids)] = torch.tensor(sample.logprobs.top_logprobs)
    return rows


@torch.inference_mode()
def reference_logprobs(model: Any, sequence: Running) -> Tensor:
    """Return transformers' log-probabilities by one forward pass over all tokens."""
    logits: Tensor = model(torch.tensor([sequence.tokens], device=model.device)).logits
    return logits[0, sequence.prompt_len - 1 : -1].float().log_softmax(-1).cpu()


def test_sixteen_concurrent_requests_equal_transformers(tmp_path: Path, build: Callable[..., ModelRunner]) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    reference = reference_model(directory)
    prompts = prompts_of(tuple(random.Random(3).randrange(1, 120) for _ in range(16)))
    results = Stepper(build(directory, max_num_seqs=16)).generate(prompts, 12, chunk=32, stagger=1)
    assert [r.output for r in results] == [reference_greedy(reference, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": 20}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"num_key_value_heads": 1}, marks=pytest.mark.slow),
        ("ministral3", {}),
        pytest.param("mistral4", {"q_lora_rank": None}, marks=pytest.mark.slow),
        ("qwen3_moe", {"mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2}),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, marks=pytest.mark.slow),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
        pytest.param("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_experts": 4}, marks=pytest.mark.slow),
        pytest.param(
            "granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]}, marks=pytest.mark.slow
        ),
        pytest.param("nemotron_h", {"hybrid_override_pattern": "MEM*-"}, marks=pytest.mark.slow),
        pytest.param("falcon_h1", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {"q_lora_rank": None}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"num_attention_heads": 20, "num_key_value_heads": 20}, marks=pytest.mark.slow),
    ],
)
def test_triton_kernels_yield_the_tokens_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    directory = make_checkpoint(tmp_path / "model", family, num_hidden_layers=2, **overrides)
    reference = reference_model(directory)
    prompts = prompts_of((1, 17, 33))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stepper = Stepper(build(directory, attention_backend="triton", device=device))
    results = stepper.generate(prompts, 4, chunk=20, stagger=1)
    assert [r.output for r in results] == [reference_greedy(reference, prompt, 4) for prompt in prompts]


FREED: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt-oss": ("gpt_oss", {"sliding_window": 9, "num_hidden_layers": 2}, 4),
    "mistral": ("mistral", {"sliding_window": 17, "layer_types": ["full_attention"] + ["sliding_attention"] * 3}, 8),
    "all windows": ("mistral", {"sliding_window": 17}, 8),
}


@pytest.mark.parametrize(
    ("version", "backend", "case"),
    [
        *(("V1", "torch", case) for case in FREED),
        *(pytest.param(version, "triton", case, marks=pytest.mark.slow) for version in ("V1", "V2") for case in FREED),
    ],
)
def test_blocks_behind_windows_are_never_read(
    version: str, backend: str, case: str, tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    """Blocks are freed and filled with NaN while sequences of several chunks and single tokens go on."""
    family, overrides, block_size = FREED[case]
    layers = {"num_hidden_layers": len(overrides.get("layer_types", "ab"))}
    directory = make_checkpoint(tmp_path / "model", family, **{**layers, **overrides})
    reference = reference_model(directory)
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    sizes = {"block_size": block_size, "kernel_block_size": 4}
    stepper = Stepper(build(directory, runner=version, attention_backend=backend, device=device, **sizes))
    prompts = prompts_of((1, 43, 70) if backend == "torch" else (1, 43))
    results = stepper.generate(prompts, 8, chunk=13, stagger=1)
    assert [r.output for r in results] == [reference_greedy(reference, prompt, 8) for prompt in prompts]
    assert stepper.num_freed > 0


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_errs_no_more_than_transformers(
    native: bool, tmp_path: Path, build: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Computing in bfloat16, as on CPUs that can, and in float32 as on others; oneDNN emulates what is not there.
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: native)
    directory = make_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    reference = reference_model(directory, "float32")
    (result,) = Stepper(build(directory, dtype="bfloat16")).generate(prompts_of((70,)), 4, WITH_LOGPROBS)
    assert_as_close_as_bfloat16([result], reference, reference_model(directory, "bfloat16"))


def assert_as_close_as_bfloat16(results: list[Running], exact_model: Any, rounded_model: Any) -> None:
    """Check that a runner errs no more than transformers in bfloat16, both against float32 on the same weights."""
    ours, theirs = errors_of(results, exact_model, rounded_model)
    assert ours.mean() <= 1.2 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


def errors_of(results: list[Running], exact_model: Any, rounded_model: Any) -> tuple[Tensor, Tensor]:
    """Return the errors of log-probabilities, a runner's and those of a rounded model, each [positions, VOCAB]."""
    exact = torch.cat([reference_logprobs(exact_model, result) for result in results])
    rounded = torch.cat([reference_logprobs(rounded_model, result) for result in results])
    ours = torch.cat([logprobs_of(result) for result in results])
    return (ours - exact).abs(), (rounded - exact).abs()


def needs_a_gpu(backend: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("no flashinfer")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("version", "backend"), [("V1", "torch"), ("V1", "triton"), ("V2", "triton")])
def test_cuda_yields_the_tokens_of_transformers(
    version: str, backend: str, family: str, tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    needs_a_gpu(backend)
    directory = make_checkpoint(tmp_path / "model", family)
    reference = reference_model(directory)
    prompts = prompts_of((1, 16, 17, 300))
    expected = [reference_greedy(reference, prompt, 20) for prompt in prompts]
    model_runner = build(directory, device="cuda", runner=version, attention_backend=backend)
    results = Stepper(model_runner).generate(prompts, 20, chunk=37, stagger=1)
    assert [r.output for r in results] == expected


def published_heads(family: str) -> dict[str, Any]:
    """Return fields of a config with head sizes for which FlashInfer has kernels."""
    fields: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 768}
    fields |= PUBLISHED_LATENT if family in LATENT else {"head_dim": 128}
    if family == "mistral":
        fields["sliding_window"] = 100
    if family == "minimax_m2":
        fields["rotary_dim"] = 64
    if family in RECURRENT:
        fields |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if family in MAMBA2:
        fields |= published_mamba2(family)
    return fields


def published_mamba2(family: str) -> dict[str, Any]:
    """Return heads of 64 values and 128 values of state."""
    if family == "nemotron_h":
        return {"mamba_head_dim": 64, "ssm_state_size": 128}
    if family == "granitemoehybrid":
        return {"num_attention_heads": 4, "mamba_n_heads": 16, "mamba_d_state": 128}
    return {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_state": 128}


def every_expert(family: str) -> dict[str, Any]:
    """Return fields by which a mixture's router chooses every expert; none for other families."""
    defaults = CONFIG_CLASSES[family][2] if family in CONFIG_CLASSES else {}
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in defaults:
            groups = {"n_group": 1, "topk_group": 1} if "n_group" in defaults else {}
            return {"num_experts_per_tok": defaults[name], **groups}
    return {}


@pytest.mark.gpu
@pytest.mark.timeout(600)  # FlashInfer may compile
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("version", "backend"),
    [("V1", "torch"), ("V1", "triton"), ("V1", "flashinfer"), ("V2", "triton"), ("V2", "flashinfer")],
)
def test_cuda_in_bfloat16_errs_no_more_than_transformers(
    version: str, backend: str, family: str, tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    """Cover a graph of one row, padded graphs, and steps too large for a graph.

    A mixture uses every expert of a layer. Otherwise a rounding error may change which experts a token gets, in one
    computation and not in another, and the mean error then depends on how often it does.
    """
    needs_a_gpu(backend)
    directory = make_checkpoint(
        tmp_path / "model", family, dtype="bfloat16", **published_heads(family), **every_expert(family)
    )
    results = generate_in_bfloat16(build, directory, version, backend)
    models = [reference_model(directory, dtype).to("cuda") for dtype in ("float32", "bfloat16")]
    assert_as_close_as_bfloat16(results, *models)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [family for family in FAMILIES if every_expert(family)])
@pytest.mark.parametrize(("version", "backend"), [("V1", "torch"), ("V1", "triton"), ("V2", "triton")])
def test_cuda_in_bfloat16_errs_no_more_where_experts_are_chosen(
    version: str, backend: str, family: str, tmp_path: Path, build: Callable[..., ModelRunner]
) -> None:
    """Compare the median error of a position: few positions get other experts than in float32."""
    needs_a_gpu(backend)
    directory = make_checkpoint(tmp_path / "model", family, dtype="bfloat16", **published_heads(family))
    results = generate_in_bfloat16(build, directory, version, backend)
    models = [reference_model(directory, dtype).to("cuda") for dtype in ("float32", "bfloat16")]
    ours, theirs = errors_of(results, *models)
    assert ours.mean(1).median() <= 1.2 * theirs.mean(1).median()


def generate_in_bfloat16(
    build: Callable[..., ModelRunner], directory: Path, version: str, backend: str
) -> list[Running]:
    stepper = Stepper(
        build(directory, device="cuda", dtype="bfloat16", runner=version, attention_backend=backend, max_model_len=3000)
    )
    results = stepper.generate(prompts_of((90,)), 6, WITH_LOGPROBS)
    return results + stepper.generate(prompts_of((1, 17, 33, 800, 64)), 6, WITH_LOGPROBS, chunk=700)
