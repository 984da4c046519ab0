"""/docs in a real browser.

Each size and colour scheme leaves a screenshot: ``pytest --basetemp=DIR tests/dashboard -k docs_page_fits`` says where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from playwright.sync_api import Browser
from web_pages import WINDOWS, accessibility_faults


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_docs_page_fits_small_and_large_windows(
    width: int, scheme: Any, browser: Browser, fleet: Fleet, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(f"{fleet.url}/docs")
    for index in (0, 1):
        page.locator("summary").nth(index).click()
    page.screenshot(path=tmp_path / f"docs-{width}-{scheme}.png")
    page.locator("#ChatBody").scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / f"docs-{width}-{scheme}-schema.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('td, th, summary')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert page.evaluate(f"{cut}.map(e => e.textContent)") == []
    assert page.locator("main").inner_text().count("`") == 0
    assert accessibility_faults(page, exclude="section > div:nth-of-type(n + 4)") == []  # the others are alike
    assert complaints == []
    page.close()
