"""Every series that tools of other projects ask for by vLLM's names is exported, or listed as meaningless.

tests/e2e/test_exported_metrics.py compares the table of docs/metrics.md with what a fleet exports.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from exposition import documented_metrics

LISTED = tomllib.loads((Path(__file__).parent / "vllm_series.toml").read_text())
SERIES = {name: labels for row in documented_metrics() for name, labels in row.series.items()}


@pytest.mark.parametrize("tool", LISTED["asked"])
def test_each_series_is_exported_or_meaningless(tool: str) -> None:
    missing = set(LISTED["asked"][tool]) - SERIES.keys() - LISTED["meaningless"].keys()
    assert not missing


def test_no_exported_series_is_listed_as_meaningless() -> None:
    assert not SERIES.keys() & LISTED["meaningless"].keys()


def test_series_have_the_labels_that_queries_select_by() -> None:
    labels = LISTED["labels"]
    for name, series_labels in SERIES.items():
        if name.startswith("vllm:"):
            assert {*labels["all"], *labels.get(name, ())} <= series_labels
