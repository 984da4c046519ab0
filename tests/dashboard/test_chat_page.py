"""The chat page in a real browser, with a real router and simulated nodes.

Each size and colour scheme leaves a screenshot: ``pytest --basetemp=DIR tests/dashboard -k chat_page_fits`` says where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fleet import MODEL_NAME, Fleet
from playwright.sync_api import Browser, Page, Request, expect
from web_pages import CONTRASTS, Watched

LONG = "Answer from this text. " + "The river is long and the bridge is old. " * 8  # enough tokens for a handoff

MARKDOWN = """# Prefill and decode

A *prefill node* turns a prompt into a **KV cache**; see [NIXL](https://github.com/ai-dynamo/nixl) and `kv_transfer`.

1. P computes the prompt:
   - in chunks
   - with ~~one~~ many ranks
2. D reads the blocks

| role | bound by |
|:-----|---------:|
| prefill | compute |
| decode | memory |

```python
def blocks(tokens: int, size: int = 16) -> int:
    return -(-tokens // size)  # <b>rounded up</b>, and a line that is longer than a phone is wide, so it scrolls
```

> Blocks are **leased**
> until released."""

HOSTILE = """<img src=x onerror=alert(1)><script>alert(2)</script> [a](javascript:alert(3)) ![b](https://evil.example/x.png)
[c](data:text/html,x) [d](/v1/models) `<i>` https://ok.example/?q=<b>
| <img src=x> | b |
|---|---|
| **<u>** | c |"""


@pytest.fixture
def page(watched: Watched, fleet: Fleet) -> Iterator[Page]:
    """Open the page; at the end, assert no console errors and no requests to other hosts."""
    page = watched.open(fleet.url)
    expect(page.locator("#model")).to_have_value(MODEL_NAME)
    yield page
    assert watched.complaints == []
    assert all(url.startswith(f"{fleet.url}/") for url in watched.requests)


def limit(page: Page, max_tokens: int) -> None:
    page.locator("#settings-button").click()
    page.locator("#max_tokens").fill(str(max_tokens))
    page.locator("#settings-button").click()


def ask(page: Page, text: str) -> None:
    page.locator("#entry").fill(text)
    page.keyboard.press("Enter")


def test_answers_stream_with_nodes_speed_and_history(page: Page) -> None:
    bodies: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.method == "POST":
            bodies.append(cast(dict[str, Any], request.post_data_json))

    page.on("request", keep)
    limit(page, 24)
    page.locator("#settings-button").click()
    page.locator("#system").fill("Be brief.")
    ask(page, LONG)
    served = page.locator(".assistant .served")
    expect(served).to_contain_text(re.compile(r"p-one → d-.* · first token .* · .* tokens/s · 24 tokens"))
    expect(served).to_contain_text("stopped at the limit of tokens")
    expect(served.locator("a")).to_have_attribute("href", "dashboard")
    text = page.evaluate("Object.values(localStorage).map(JSON.parse)[0].messages[1].content")
    assert text
    ask(page, "And again?")
    expect(served).to_have_count(2)
    expect(served.last).to_contain_text(re.compile(r"[1-9]\d* of \d+ prompt tokens cached"))
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies[1]["messages"][2]["content"] == text
    assert bodies[1]["max_tokens"] == 24
    page.reload()
    expect(page.locator(".message")).to_have_count(4)  # the browser keeps conversations
    expect(page.locator("#system")).to_have_value("Be brief.")


def test_page_without_scripts_names_the_command(browser: Browser, fleet: Fleet) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(fleet.url)
    expect(page.locator("noscript code")).to_be_in_viewport()
    context.close()


def test_stop_ends_an_answer_and_keeps_its_text(page: Page, fleet: Fleet) -> None:
    ask(page, "Tell me everything.")
    expect(page.locator(".assistant > .text")).not_to_be_empty()
    page.locator("#stop").click()
    expect(page.locator(".assistant .served")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".assistant > .text")).not_to_be_empty()
    for node in fleet.decode:
        node.wait_idle()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message")).to_have_count(2)


def test_error_of_the_router_is_shown_and_not_sent_again(page: Page, watched: Watched) -> None:
    limit(page, 10_000_000)
    ask(page, "Too much.")
    expect(page.locator(".assistant [role=alert]")).to_contain_text("max_tokens")
    watched.complaints.clear()  # the browser logs the status 400
    limit(page, 4)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Less.")
    assert cast(dict[str, Any], sent.value.post_data_json)["messages"] == [{"role": "user", "content": "Less."}]
    expect(page.locator(".assistant .served").last).to_contain_text("tokens")


def test_conversations_are_listed_opened_and_deleted(page: Page) -> None:
    limit(page, 4)
    for title in ("First question", "Second question"):
        page.locator("#new").click()
        ask(page, title)
        expect(page.locator(".assistant .served")).to_contain_text("tokens")
    page.locator("#conversations .open", has_text="First question").click()
    expect(page.locator(".user > .text")).to_have_text("First question")
    page.get_by_role("button", name="Delete: First question").click()
    expect(page.locator(".user > .text")).to_have_text("Second question")
    page.reload()
    expect(page.locator("#conversations .open")).to_have_text(["Second question"])


def shown(page: Page, text: str) -> str:
    """Return the HTML that the page makes of Markdown, after it has seen every beginning of it."""
    script = """async (text) => {
      const {showMarkdown} = await import('/chat/markdown.js');
      const target = document.createElement('div');
      for (let end = 0; end <= text.length; end += 1) showMarkdown(target, text.slice(0, end));
      for (const button of target.querySelectorAll('button')) button.remove();
      return target.innerHTML;
    }"""
    return str(page.evaluate(script, text))


MARKDOWN_CASES = [
    ("a\nb", "<p>a<br>b</p>"),
    ("**a *b* c** ***d***", "<p><strong>a <em>b</em> c</strong> <strong><em>d</em></strong></p>"),
    ("2 * 3 * 4 snake_case_name", "<p>2 * 3 * 4 snake_case_name</p>"),
    ("- a\n- b\n  1. c\n\n  d", "<ul><li>a</li><li>b<ol><li>c</li></ol><p>d</p></li></ul>"),
    ("3. c", '<ol start="3"><li>c</li></ol>'),
    ("```c\n**x**\n", '<span>c</span></figcaption><pre tabindex="0"><code>**x**\n</code>'),
    ("a|b\n-|-:\n1|2", '<th class="left">a</th><th class="right">b</th>'),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    (r"\*a\* `` b`c `` ~~d~~", "<p>*a* <code>b`c</code> <del>d</del></p>"),
    (
        "see https://x.example/a_b_c.",
        '<a href="https://x.example/a_b_c" target="_blank" rel="noopener noreferrer">',
    ),
    ("**unclosed `code [link](", "<p>**unclosed `code [link](</p>"),
]


def test_markdown_becomes_elements(page: Page) -> None:
    for text, html in MARKDOWN_CASES:
        assert html in shown(page, text)


def test_markup_of_a_model_stays_text(page: Page) -> None:
    """The fixture asserts that it loads nothing and opens no dialog. Pathological text takes no quadratic time."""
    html = shown(page, HOSTILE)
    assert re.findall(r"<(img|script|u|i|b)\b", html) == []
    assert re.findall(r'href="([^"]*)"', html) == ["https://evil.example/x.png", "https://ok.example/?q="]
    for unit in ("*a ", "[", "**a_", "`a``", "> ", "- ", "|-", "~~a*b_"):
        text = unit * (50_000 // len(unit))
        script = "async (text) => (await import('/chat/markdown.js')).showMarkdown(document.createElement('div'), text)"
        page.evaluate(script, text)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_chat_page_fits_small_and_large_windows(
    width: int, scheme: Any, browser: Browser, fleet: Fleet, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(fleet.url)
    stats = {"prefillNode": "p-one", "decodeNode": "d-one", "ttft": 0.0312, "tokenRate": 148.2, "outputTokens": 212}
    stats |= {"promptTokens": 1840, "cachedTokens": 1792, "stopped": ""}
    messages = [{"role": "user", "content": "How does pdserve split prefill and decode?"}]
    messages.append({"role": "assistant", "content": MARKDOWN, "stats": stats})  # type: ignore[dict-item]
    stored = json.dumps({"id": "1", "updated": 1, "settings": {}, "messages": messages})
    page.evaluate("text => localStorage.setItem('pdserve-chat-1', text)", stored)
    page.reload()
    expect(page.locator("#model")).to_have_value(MODEL_NAME)
    page.screenshot(path=tmp_path / f"chat-{width}-{scheme}.png")
    page.locator("#settings-button").click()
    if width == 400:
        page.locator("#menu").click()
        expect(page.locator("#new")).to_be_in_viewport()
    page.screenshot(path=tmp_path / f"chat-{width}-{scheme}-open.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    assert page.evaluate(
        "document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth"
    )
    assert page.evaluate(CONTRASTS) == []
    page.close()
