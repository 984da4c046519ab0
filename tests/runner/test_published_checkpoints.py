"""Checkpoints in the form in which they are published are served with the tokens of transformers' whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import node_config, reference_greedy
from published_checkpoints import FORMS
from safetensors.torch import save_file
from stepper import Stepper

import runner
from pdserve.errors import CheckpointError
from pdserve.weights.change import WeightChange

PROMPTS = [list(range(3, 3 + length)) for length in (1, 15, 40)]
NUM_TOKENS = 6


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # GLM without shared experts
@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_yields_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    published = FORMS[form](tmp_path)
    model_class: Any = getattr(transformers, published.whole)
    reference = model_class.from_pretrained(published.reference, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    built = runner.build(node_config(published.checkpoint, max_model_len=200), lambda stage, fraction: None)
    try:
        for prompt, sequence in zip(PROMPTS, Stepper(built).generate(PROMPTS, NUM_TOKENS, chunk=7), strict=True):
            assert sequence.output == reference_greedy(reference, prompt, NUM_TOKENS)
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
