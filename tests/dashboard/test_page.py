"""The dashboard page in a real browser, with a real router and simulated nodes.

Each size and colour scheme leaves a screenshot: ``pytest --basetemp=DIR tests/dashboard -k fits`` says where.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import MODEL_NAME, Fleet, NodeProcess
from playwright.sync_api import Browser, Locator, Page, Route, expect
from watched_fleet import HOSTILE, Streams
from web_pages import CONTRASTS, PATIENCE, WINDOWS, Watched, accessibility_faults

from cli import numbers
from router.gate.api_keys import key_entry, new_key


@pytest.fixture
def page(watched: Watched, fleet: Fleet) -> Iterator[Page]:
    """Open the live page; at the end, assert no console errors and no requests to other hosts."""
    yield live(watched.open(f"{fleet.url}/dashboard"))
    assert watched.complaints == []
    home = f"{fleet.url}/"  # asked whether it is there, for the link
    assert all(url == home or url.startswith(f"{fleet.url}/dashboard") for url in watched.requests)


def live(page: Page) -> Page:
    expect(page.locator("#link")).to_have_text("Live")
    return page


def row(page: Page, name: str) -> Locator:
    return page.locator("tbody tr").filter(has=page.locator(".name b", has_text=name))


def cell(row: Locator, title: str) -> Locator:
    return row.locator(f"[data-title='{title}']")


def wait_running(page: Page, name: str, fleet: Fleet, node: NodeProcess) -> None:
    """Wait until the page shows the node's state, since requests may restart on another node."""
    running = cell(row(page, name), "Running")
    fleet.wait_until(lambda: running.inner_text() == str(node.status().running), PATIENCE / 1000)


def test_dashboard_rows_show_node_values(page: Page, fleet: Fleet, streams: Streams) -> None:
    with streams(4):
        expect(page.locator("#tile-running b")).to_have_text("4")
        expect(page.locator("#tile-nodes dd").first).to_have_text("3of 3")
        for node, name in zip(fleet.decode, ("d-one", "d-<img"), strict=True):
            wait_running(page, name, fleet, node)
            expect(cell(row(page, name), "KV in use")).to_contain_text(f"of {node.status().total_blocks:,} blocks")
            expect(cell(row(page, name), "Output tokens/s")).to_have_text(re.compile("[1-9]"))
            expect(cell(row(page, name), "Step")).to_contain_text("ms")
        expect(page.locator("#connections tbody tr")).to_have_count(2)
        expect(page.locator("#connections .state.good")).to_have_count(2)
        expect(page.locator("#tile-ttft b")).not_to_have_text(numbers.UNKNOWN)
        expect(page.locator("#tile-itl dd").first).to_contain_text("ms")
        expect(page.locator("#tile-handoff dd").first).to_contain_text("ms")
        expect(page.locator("#handoffs-count")).to_contain_text(re.compile(r"^[1-9]\d* so far"))
    expect(page.locator("#tile-running b")).to_have_text("0")
    for name in ("d-one", "d-<img"):
        expect(cell(row(page, name), "KV in use")).to_contain_text("0 of ")


EQUAL = {  # a tile, and the line whose latest value it is
    "requests": "finished",
    "failures": "failed",
    "tokens": "tokens/s",
    "ttft": "Time to first token: p50",
    "itl": "Time to next token: p50",
    "handoff": "Handoff time, P → D: p50",
}
SHOWN = """() => {
  const charts = [...document.querySelectorAll('#charts figure')].flatMap((figure) =>
    [...figure.querySelectorAll('.legend > span')].flatMap((line) => {
      const name = line.childNodes[1].textContent.trim(), value = line.querySelector('b').textContent;
      return [[name, value], [`${figure.querySelector('h3').textContent}: ${name}`, value]];
    }));
  const tiles = [...document.querySelectorAll('.tiles > div')].map((tile) => [tile.id.replace('tile-', ''),
    [...tile.querySelectorAll('dd:not(.more) > *')].map((part) => part.textContent)]);
  return [Object.fromEntries(tiles), Object.fromEntries(charts)];
}"""


def test_tiles_and_charts_show_the_same_figures(page: Page, fleet: Fleet, streams: Streams) -> None:
    with streams(2):
        expect(page.locator("#tile-handoff b")).not_to_have_text(numbers.UNKNOWN)
        for _ in range(3):
            page.wait_for_timeout(1000)  # other figures each second
            tiles, charts = page.evaluate(SHOWN)
            assert charts["KV read, P → D: all nodes"] != numbers.UNKNOWN
            for tile, line in EQUAL.items():
                number, unit = tiles[tile]
                timed = line.endswith("p50") and unit
                assert charts[line].replace("\u202f", " ") == (f"{number} {unit}" if timed else number)


def test_nodes_show_where_cached_tokens_came_from(watched: Watched, fleet: Fleet) -> None:
    """The shares are added to the router's answer: the nodes here have neither host memory nor sources."""

    def add_shares(route: Route) -> None:
        response = route.fetch()
        report = response.json()
        for node in report["now"]["nodes"]:
            if node["stats"]:
                node["stats"].update(
                    cached_share=0.94, host_share=0.31, pulled_share=0.22 if node["name"] == "p-one" else None
                )
        route.fulfill(response=response, json=report)

    watched.page.route("**/dashboard/state*", add_shares)
    page = live(watched.open(f"{fleet.url}/dashboard"))
    shown = cell(row(page, "p-one"), "From cache")
    expect(shown.locator("b")).to_have_text("94\u202f%")
    expect(shown.locator("small")).to_have_text("host 31\u202f%, pulled 22\u202f%")
    expect(cell(row(page, "d-one"), "From cache").locator("small")).to_have_text("host 31\u202f%")


def test_markup_in_node_names_is_escaped(page: Page) -> None:
    """The fixture asserts that injected markup loads no image and opens no dialog."""
    name = row(page, "d-<img").locator(".name b")
    assert name.evaluate("element => element.textContent") == HOSTILE
    assert name.locator("*").count() == 0


def test_dead_node_is_shown_lost_until_it_returns(page: Page, fleet: Fleet) -> None:
    victim = fleet.decode[0]
    expect(cell(row(page, "d-one"), "State")).to_have_text("ready")
    victim.kill()
    expect(cell(row(page, "d-one"), "State")).to_contain_text("lost for")
    expect(cell(row(page, "d-one"), "Running")).to_have_text(numbers.UNKNOWN)
    expect(page.locator("#tile-nodes")).to_contain_text("1 lost")
    expect(page.locator("#announcements")).to_contain_text("d-one: lost")
    victim.restart()
    expect(cell(row(page, "d-one"), "State")).to_have_text("ready")
    expect(page.locator("#tile-nodes")).to_contain_text("all well")


def test_handoffs_are_one_line_each_between_nodes_without_names(watched: Watched, model: Path) -> None:
    """Addresses replace the names, and are longer than most names."""
    flags = ["--engine", "simulated"]
    with Fleet() as fleet:
        fleet.start_prefill(model, flags)
        fleet.start_decode(model, flags)
        fleet.start_router(model)
        fleet.wait_ready()
        page = watched.open(f"{fleet.url}/dashboard")
        ends = page.locator("#connections .ends")
        expect(ends).to_have_text(f"{fleet.prefill[0].address} →{fleet.decode[0].address}")
        first, second = (ends.locator("span").nth(index).bounding_box() for index in (0, 1))
        assert first is not None
        assert second is not None
        assert first["y"] == second["y"]
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#composer")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_dashboard_fits_small_and_large_windows(
    width: int, scheme: Any, browser: Browser, fleet: Fleet, streams: Streams, tmp_path: Path
) -> None:
    with streams(2):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(f"{fleet.url}/dashboard")
        expect(cell(row(page, "d-one"), "Output tokens/s")).not_to_have_text(numbers.UNKNOWN)
        page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('dd, td, th, .legend')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert page.evaluate(f"{cut}.map(e => e.textContent)") == []
    assert page.evaluate(CONTRASTS) == []
    assert accessibility_faults(page) == []
    page.close()


def test_dashboard_works_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    for link in ("Chat", "API"):
        expect(page.get_by_role("link", name=link, exact=True)).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name=link, exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    chart = page.locator(".plot").first
    expect(chart).to_be_focused()
    assert "now: running" in str(chart.get_attribute("aria-label"))
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#lines-when")).to_have_text("5 s ago")
    page.keyboard.press("Escape")
    expect(page.locator("#lines-when")).to_have_text("")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#nodes")).to_be_focused()


def test_hidden_dashboard_stops_polling(page: Page, watched: Watched) -> None:
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')) }"
    page.evaluate(hide, True)
    expect(page.locator("#link")).to_have_text("Paused")
    asked = len(watched.requests)
    page.wait_for_timeout(1500)  # more than a period
    assert len(watched.requests) == asked
    page.evaluate(hide, False)
    live(page)


def test_dashboard_recovers_with_the_router(watched: Watched, fleet: Fleet, model: Path) -> None:
    page = live(watched.open(f"{fleet.url}/dashboard"))
    assert fleet.router is not None
    port = fleet.router.address.rpartition(":")[2]
    fleet.router.signal(signal.SIGTERM)
    expect(page.locator("#link")).to_contain_text("No answer for")
    expect(page.locator("#trouble")).to_contain_text("The router does not answer.")
    expect(row(page, "p-one")).to_be_visible()  # what was known stays
    fleet.router.wait_ended(10.0)
    fleet.start_router(model, ["--port", port])
    live(page)
    expect(page.locator("#trouble")).to_be_hidden()
    expect(cell(row(page, "p-one"), "State")).to_have_text("ready")
    assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in watched.complaints)


def test_dashboard_asks_for_an_api_key(watched: Watched, fleet: Fleet, model: Path, tmp_path: Path) -> None:
    key = new_key()
    file = tmp_path / "keys.toml"
    file.write_text(key_entry("alice", key))
    open_router = fleet.router
    try:
        guarded = fleet.start_router(model, ["--api-keys", str(file)])
        fleet.wait_until(lambda: guarded.child.state == "ready", 30.0)
        page = watched.open(f"{fleet.url}/dashboard")
        expect(page.get_by_label("API key")).to_be_focused()
        expect(page.locator("#nodes")).to_be_hidden()
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#door-why")).to_have_text("The router does not know this key.")
        page.keyboard.type(key)
        page.keyboard.press("Enter")
        expect(row(live(page), "p-one")).to_be_visible()
        live(page).reload()
        expect(row(live(page), "p-one")).to_be_visible()  # the tab remembers it
        page.evaluate("sessionStorage.clear()")
        page.goto(fleet.url)  # the chat page asks, too
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_value(MODEL_NAME)
        assert not any(key in url for url in watched.requests)
        guarded.signal(signal.SIGTERM)
        guarded.wait_ended(10.0)
    finally:
        fleet.router = open_router


def test_dashboard_formats_numbers_like_top(page: Page) -> None:
    values = [0, 0.004, 0.0437, 0.31, 0.997, 1.26, 7, 9.96, 42.4, 99.7, 118, 631, 4321, 9999, 12345, 678901, 7.7e6, 3e9]
    names = {"count": "count", "rate": "rate", "seconds": "seconds", "bytesPerSecond": "bytes_per_second"}
    names["percent"] = "percent"
    script = (
        "async ([name, values]) => { const all = await import('/dashboard/format.js'); return values.map(all[name]) }"
    )
    for theirs, ours in names.items():
        shown = page.evaluate(script, [theirs, [*values, None]])
        said = [getattr(numbers, ours)(value) for value in values]
        assert [text.replace("\u202f", " ") for text in shown] == [*said, numbers.UNKNOWN]
