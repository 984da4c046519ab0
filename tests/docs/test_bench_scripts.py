"""Each program of bench/ has a figure on docs/numbers.md and a row on docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text())
WITHOUT_FIGURE = {"goodput.py"}  # goodput_fleets.py runs it, and users run it on their systems (docs/compare.md)


def test_programs_exist() -> None:
    assert len(PROGRAMS) >= 20
    assert set(PROGRAMS) >= WITHOUT_FIGURE


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_a_figure(name: str) -> None:
    assert name in WITHOUT_FIGURE or f"bench/{name}" in (ROOT / "docs" / "numbers.md").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_a_row(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "benchmarks.md").read_text()
