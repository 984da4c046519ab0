"""docs/structure.md describes the tree as it is, and its terms lead to the files that it names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text()
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]*)+)`")
ROWS = re.findall(r"^\| ([^|]+) \| (.+) \|$", PAGE[PAGE.index("## To change") :], re.MULTILINE)[1:]
TERMS = [(term, PATH.findall(files)) for term, files in ROWS if not set(term) <= {"-"}]


def test_page_is_short() -> None:
    assert len(PAGE.encode()) <= 15 * 1024


def test_reading_list_is_twelve_files_of_at_most_2500_lines() -> None:
    listed = re.findall(r"^\d+\. `([^`]+)`", PAGE, re.MULTILINE)
    assert len(listed) == 12
    assert sum(len((ROOT / path).read_text().splitlines()) for path in listed) <= 2500


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_paths_in_docs_exist(page: str) -> None:
    top = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = {path for path in PATH.findall((ROOT / "docs" / page).read_text()) if path.split("/")[0] in top}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_page_names_at_least_twenty_changes() -> None:
    assert len(TERMS) >= 20


@pytest.mark.parametrize(("term", "files"), TERMS, ids=[term for term, _ in TERMS])
def test_searching_for_the_term_finds_the_files(term: str, files: list[str]) -> None:
    """The Python files of a row have the term in their text or name; words may be joined by a space, "-" or "_"."""
    words = re.escape(term.partition(" (")[0]).replace(r"\ ", "[-_ \n]").replace(r"\-", "[-_ ]")
    pattern = re.compile(words, re.IGNORECASE)
    named = [path for path in files if path.endswith(".py")]
    assert named
    matching = [path for path in named if pattern.search(path) or pattern.search((ROOT / path).read_text())]
    assert matching == named


def test_the_checkout_has_no_other_top_level_package() -> None:
    """A new package needs a row in the table of folders."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packages = {path.split("/")[0] for path in tracked if path.endswith(".py") and "/" in path}
    assert packages - {"tests", "bench", "deploy", "training"} == {
        "pdserve",
        "cli",
        "node",
        "engine",
        "runner",
        "connector",
        "router",
        "prefill_node",
        "decode_node",
        "elastic_node",
    }
