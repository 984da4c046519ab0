"""Pages are short, stand in the index and in the navigation, and link to each other by their own names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS = 3000
LONG = {"numbers.md"}  # all figures on one page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    assert page.name in LONG or len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_index_and_navigation(page: Path) -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert page.name == "index.md" or f"]({page.name}" in index
    assert f"- {page.name}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_label_that_names_a_page_names_its_target(page: Path) -> None:
    links = re.findall(r"\[([\w-]+\.md)\]\(([\w-]+\.md)?(?:#[\w-]+)?\)", page.read_text())
    assert [label for label, target in links if target and label != target] == []
