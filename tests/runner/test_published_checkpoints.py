"""Checkpoints in the form in which they are published are served with the tokens of transformers' whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import node_config, reference_greedy
from differential import logprobs_of
from published_checkpoints import FORMS, Published
from safetensors.torch import save_file
from stepper import Stepper

import runner
from pdserve.errors import CheckpointError
from pdserve.model.model_config import ModelConfig
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange

PROMPTS = [list(range(3, 3 + length)) for length in (1, 15, 40)]
NUM_TOKENS = 6
FEW_TOKENS = 1024  # vocabularies up to this size are compared as a whole


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # GLM without shared experts
@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_yields_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    compare_with_the_whole(FORMS[form](tmp_path), PROMPTS, NUM_TOKENS, 7)


SLOW_ON_V2 = ("Mistral-Small-4", "Kimi-K2.5", "GLM-4.5V", "InternVL3.5 with experts")


@pytest.mark.parametrize("form", ["Ministral-3", *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW_ON_V2)])
def test_v2_yields_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    """FP8 weights stay as they are."""
    published = FORMS[form](tmp_path)
    model = compare_with_the_whole(published, [list(range(3, 23))], 2, 16, runner="V2", attention_backend="triton")
    assert model.impl == "native"
    kept = [f"{layer}.{name}_proj" for layer in range(3) for name in ("q", "k", "v", "o", "gate", "up", "down")]
    assert {*model.layer_forms} == ({*kept} if form == "Ministral-3" else set())


def compare_with_the_whole(
    published: Published, prompts: list[list[int]], num_tokens: int, chunk: int, **options: Any
) -> ModelConfig:
    """Compare tokens, and log-probabilities of small vocabularies; ``options`` go to node_config."""
    model_class: Any = getattr(transformers, published.whole)
    reference = model_class.from_pretrained(published.reference, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    config = node_config(published.checkpoint, max_model_len=200, **options)
    vocabulary = config.model.vocab_size
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=min(vocabulary, FEW_TOKENS))
    built = runner.build(config, lambda stage, fraction: None)
    try:
        results = Stepper(built).generate(prompts, num_tokens, sampling, chunk=chunk)
    finally:
        built.close()
    for prompt, sequence in zip(prompts, results, strict=True):
        assert sequence.output == reference_greedy(reference, prompt, num_tokens)
        if vocabulary <= FEW_TOKENS:
            with torch.inference_mode():
                logits = reference(torch.tensor([sequence.tokens])).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(logprobs_of(sequence), logits.log_softmax(-1), atol=2e-4, rtol=1e-4)
    return config.model


def test_a_patch_of_transposed_experts_is_refused(tmp_path: Path) -> None:
    published = FORMS["Qwen3-VL with experts"](tmp_path)
    built = runner.build(node_config(published.checkpoint, max_model_len=200), lambda stage, fraction: None)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    patch = tmp_path / "patch.safetensors"
    save_file({f"{name}.rows.0": torch.zeros(1, 48, 64)}, patch)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is stored transposed"):
        built.change_weights(WeightChange(patch=str(patch)))
    built.close()
