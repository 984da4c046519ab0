"""Checkpoints in the form in which they are published are served with the tokens of transformers' whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import node_config, reference_greedy
from differential import logprobs_of
from published_checkpoints import FORMS
from safetensors.torch import save_file
from stepper import Stepper

import runner
from pdserve.errors import CheckpointError
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange

PROMPTS = [list(range(3, 3 + length)) for length in (1, 15, 40)]
NUM_TOKENS = 6
FEW_TOKENS = 1024  # vocabularies up to this size are compared as a whole


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # GLM without shared experts
@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_yields_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    published = FORMS[form](tmp_path)
    model_class: Any = getattr(transformers, published.whole)
    reference = model_class.from_pretrained(published.reference, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    config = node_config(published.checkpoint, max_model_len=200)
    built = runner.build(config, lambda stage, fraction: None)
    try:
        vocabulary = config.model.vocab_size
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=min(vocabulary, FEW_TOKENS))
        results = Stepper(built).generate(PROMPTS, NUM_TOKENS, sampling, chunk=7)
        for prompt, sequence in zip(PROMPTS, results, strict=True):
            assert sequence.output == reference_greedy(reference, prompt, NUM_TOKENS)
            if vocabulary <= FEW_TOKENS:
                with torch.inference_mode():
                    logits = reference(torch.tensor([sequence.tokens])).logits[0, len(prompt) - 1 : -1]
                torch.testing.assert_close(logprobs_of(sequence), logits.log_softmax(-1), atol=2e-4, rtol=1e-4)
    finally:
        built.close()


def test_a_patch_of_transposed_experts_is_refused(tmp_path: Path) -> None:
    published = FORMS["Qwen3-VL with experts"](tmp_path)
    built = runner.build(node_config(published.checkpoint, max_model_len=200), lambda stage, fraction: None)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    patch = tmp_path / "patch.safetensors"
    save_file({f"{name}.rows.0": torch.zeros(1, 48, 64)}, patch)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is stored transposed"):
        built.change_weights(WeightChange(patch=str(patch)))
    built.close()
