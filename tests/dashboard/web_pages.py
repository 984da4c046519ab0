"""A real browser for the router's pages: pages that record requests and console errors, and checks of colours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from machine import patience
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
QUIETER = ("disable-component-update", "disable-sync", "no-sandbox")
# Width and colour scheme of a window.
WINDOWS = [
    *((400, "light"), (1280, "dark")),
    *(pytest.param(*window, marks=pytest.mark.slow) for window in ((400, "dark"), (1280, "light"))),
]
PATIENCE = 20_000  # milliseconds

expect.set_options(timeout=patience(PATIENCE))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium for one module: playwright keeps an event loop in this thread, which would disturb other tests."""
    path = next((executable for name in BROWSERS if (executable := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium here; run scripts/setup-browser as root, or install one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[f"--{flag}" for flag in (*QUIET, *QUIETER)])
        yield browser
        browser.close()


class Watched:
    """A page with its requests and its console errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def _said(self, message: ConsoleMessage) -> None:
        self.complaints.append(message.text)

    def open(self, url: str) -> Page:
        self.page.goto(url)
        return self.page


def accessibility_faults(page: Page, exclude: str = "") -> list[str]:
    """Return the rules of axe that a page breaks, each with the first element; ``exclude`` is a selector."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: scripts/setup dev")
    violations = axe.Axe().run(page, {"exclude": [[exclude]]} if exclude else None).response["violations"]
    return [
        f"{violation['id']}: {violation['nodes'][0]['html']} ({len(violation['nodes'])} elements)"
        for violation in violations
    ]


# Colours of text, by their names in colors.css, that differ too little from what they are on (WCAG 2.2, 1.4.3: 4.5).
CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16) / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = ["--text", "--quiet", "--good", "--warn", "--bad", "--first", "--second", "--prefill", "--decode"];
  const pairs = texts.flatMap((text) => ["--card", "--ground"].map((ground) => [text, ground]));
  pairs.push(["--bad", "--bad-ground"], ["--warn", "--warn-ground"], ["--quiet", "--bad-ground"]);
  return pairs.filter(([text, ground]) => {
    const [dark, bright] = [light(text), light(ground)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05) < 4.5;
  });
}"""
