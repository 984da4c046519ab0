"""Random models of each native family against transformers; bench/fuzz_models.py goes on from here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoints import FAMILIES
from differential import EQUAL, compare
from random_models import draw_model, draw_prompts, draw_setup


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_equal_transformers(family: str, tmp_path: Path) -> None:
    for case in range(3):
        numbers = random.Random(f"{family} {case}")
        model = draw_model(numbers, [family])
        setup = draw_setup(numbers, model)
        prompts = draw_prompts(numbers, model, setup["num_tokens"], 100)
        assert compare(model.write(tmp_path / str(case)), prompts, **setup) == EQUAL, model
