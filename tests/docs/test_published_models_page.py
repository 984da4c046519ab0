"""docs/published-models.md says what the code decides about each published config.

python -m pytest -m slow tests/docs/test_published_models_page.py     all models, also those of the library
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fast_set import sampled
from published_table import (
    PAGE,
    Row,
    as_page,
    decide,
    is_of_library,
    parameters_of,
    published_models,
    row_of,
    rows_of_page,
)

MODELS = published_models()


def test_page_names_every_model_and_no_other() -> None:
    assert list(rows_of_page()) == list(MODELS)
    assert len(MODELS) >= 60


@pytest.mark.parametrize("name", sampled(MODELS, every=4))
def test_row_is_what_the_code_decides(name: str, tmp_path: Path) -> None:
    """Served native models have as many parameters as their authors say, so the configs are theirs."""
    model = MODELS[name]
    row = rows_of_page()[name]
    decision = decide(model, tmp_path / "model")
    if isinstance(decision, Row):
        assert row == decision
    elif is_of_library(decision):  # the slow test has the other cells
        assert row.layers.startswith(("library, V1", "refused: "))
    else:
        assert row == row_of(decision)
        if model.billions is not None:
            assert parameters_of(decision) / 1e9 == pytest.approx(model.billions, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_row_is_what_the_code_decides(tmp_path: Path) -> None:
    """Layers of the library are made without values, and their masks are looked at up to 8,192 positions."""
    rows = {}
    for index, (name, model) in enumerate(MODELS.items()):
        decision = decide(model, tmp_path / str(index))
        rows[name] = decision if isinstance(decision, Row) else row_of(decision)
        print(name, rows[name], flush=True)
    page = as_page(rows)
    if "WRITE_PUBLISHED_TABLE" in os.environ:  # by scripts/published-table
        PAGE.write_text(page)
    assert page == PAGE.read_text()
