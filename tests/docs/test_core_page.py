"""docs/core-in-an-hour.md walks through the reading list of docs/structure.md, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "core-in-an-hour.md").read_text()
FILES = re.findall(r"^\| \d+ \| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE)


def test_the_files_are_those_of_the_reading_list() -> None:
    structure = (ROOT / "docs" / "structure.md").read_text()
    assert [path for path, _ in FILES] == re.findall(r"^\d+\. `([^`]+)`", structure, re.MULTILINE)


def test_the_minutes_are_an_hour() -> None:
    assert sum(map(int, re.findall(r"^\| (\d+) \| `", PAGE, re.MULTILINE))) == 60


@pytest.mark.parametrize(("path", "text"), FILES)
def test_each_name_is_in_its_file(path: str, text: str) -> None:
    """Names of other files have a slash."""
    source = (ROOT / path).read_text()
    names = re.findall(r"`([\w.]+)(?:\([\w, ]*\))?`", text)
    assert [name for name in names if name.split(".")[-1] not in source] == []
