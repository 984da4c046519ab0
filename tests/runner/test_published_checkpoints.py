"""Checkpoints in the form in which they are published are served with the tokens of transformers' whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import node_config, reference_greedy
from published_checkpoints import FORMS
from stepper import Stepper

import runner

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
