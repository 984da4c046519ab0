"""``pdserve bench`` with a real router and simulated nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleet import Fleet

from cli.main import main

LOAD = ["--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "4", "--random-prefix-len", "64"]


@pytest.mark.parametrize("flags", [["--max-concurrency", "2"], ["--request-rate", "50"]])
def test_figures_table_and_plot(
    flags: list[str], fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    plot = tmp_path / "bench.svg"
    assert main(["bench", fleet.url, *LOAD, *flags, "--json", str(figures), "--plot", str(plot)]) == 0
    measured = json.loads(figures.read_text())
    assert (measured["requests"], measured["failed"], measured["ended_early"]) == (6, 0, 0)
    assert measured["prompt_tokens"] == 6 * 104
    assert 64 <= measured["cached_tokens"] <= 6 * 64
    assert all(measured[name]["max"] >= measured[name]["p50"] > 0 for name in ("ttft_ms", "e2e_ms"))
    assert measured["itl_ms"]["max"] >= measured["itl_ms"]["p50"] >= 0, "on a busy machine, tokens may arrive together"
    said, progress = capsys.readouterr()
    assert "pdserve bench: 6 of 6 requests after" in progress, "stderr is no terminal"
    assert [part for part in ("TTFT", "ITL", "E2E", "6 of 6", "of 624 prompt tokens", "█") if part not in said] == []
    assert "<svg" in plot.read_text()
