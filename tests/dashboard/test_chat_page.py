"""The chat page in a real browser, with a real router and simulated nodes.

Each size and colour scheme leaves a screenshot: ``pytest --basetemp=DIR tests/dashboard -k chat_page_fits`` says where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
from fleet import MODEL_NAME, Fleet
from playwright.sync_api import Browser, Error, Page, Request, expect
from web_pages import CONTRASTS, WINDOWS, Watched, accessibility_faults

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
[e](JaVa&#115;cript:alert(4)) <javascript:alert(5)>
[f]( https://f.example/"onclick=alert(6)// "><img src=x onerror=alert(7)>")

```"onmouseover=alert(8)
<img src=x onerror=alert(9)>
```

| <img src=x onerror=alert(10)> | b |
|---|---|
| **<u>** | c |

<svg onload=alert(11)><math><mtext><table><mglyph><style><!--</style>
<img title="--&gt;&lt;img src=1 onerror=alert(12)&gt;">

[g]: javascript:alert(13)

[g] <iframe srcdoc="<script>alert(14)</script>">"""


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


def sent_bodies(page: Page) -> list[dict[str, Any]]:
    """Return a list that will hold the bodies of the page's requests."""
    bodies: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.method == "POST":
            bodies.append(cast(dict[str, Any], request.post_data_json))

    page.on("request", keep)
    return bodies


def ask(page: Page, text: str) -> None:
    page.locator("#entry").fill(text)
    page.keyboard.press("Enter")


def test_answers_stream_with_nodes_speed_and_history(page: Page) -> None:
    bodies = sent_bodies(page)
    limit(page, 24)
    page.locator("#settings-button").click()
    page.locator("#system").fill("Be brief.")
    ask(page, LONG)
    served = page.locator(".assistant .served")
    expect(served).to_have_text(
        re.compile(r"^first token .* · .* tokens/s · 24 tokens · .* · stopped at the limit of tokens.* · p-one → d-")
    )
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


def test_answers_have_a_limit_that_the_context_lowers(page: Page, watched: Watched) -> None:
    """An answer of the default length does not fit after a prompt of nearly the whole context."""
    bodies = sent_bodies(page)
    ask(page, "short")
    expect(page.locator(".assistant .served")).to_contain_text("1,024 tokens")
    assert [body["max_tokens"] for body in bodies] == [1024]
    page.locator("#new").click()
    ask(page, "word " * 7900)
    expect(page.locator(".assistant .served")).to_contain_text("tokens/s")
    assert [body.get("max_tokens") for body in bodies[1:]] == [1024, None]
    watched.complaints.clear()  # the browser logs the status 400


def test_a_sent_message_is_edited_in_place_and_drops_what_came_after(page: Page) -> None:
    limit(page, 4)
    for text in ("First", "Second"):
        ask(page, text)
        expect(page.locator(".assistant .served").last).to_contain_text("4 tokens")
    edit = page.locator(".user").first.get_by_role("button", name="Edit")
    edit.click()
    page.keyboard.press("Escape")
    expect(page.locator(".user > .text").first).to_have_text("First")
    edit.click()
    page.get_by_label("Change the message").fill("First, again")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    body = cast(dict[str, Any], sent.value.post_data_json)
    assert body["messages"] == [{"role": "user", "content": "First, again"}]
    expect(page.locator(".user > .text")).to_have_text(["First, again"])
    expect(page.locator(".assistant .served")).to_contain_text("4 tokens")
    page.reload()
    expect(page.locator(".user > .text")).to_have_text(["First, again"])


def test_code_has_colours_and_keeps_its_text(page: Page) -> None:
    cases: dict[str, tuple[str, dict[str, list[str]]]] = {
        "python": (
            "def f(x=f'#'):  # one\n    return 1.5",
            {"reserved": ["def", "return"], "string": ["'#'"], "comment": ["# one"]},
        ),
        "js": ("const a = `${b}` // c\n/* d */", {"reserved": ["const"], "string": ["`${b}`"]}),
        "sql": ("SELECT 1 -- x", {"reserved": ["SELECT"], "number": ["1"], "comment": ["-- x"]}),
        "json": ('{"a": true} // b', {"string": ['"a"'], "reserved": ["true"], "comment": []}),
        "rust": ("fn f<'a>(x: &'a str) { 'b' }", {"reserved": ["fn"], "string": ["'b'"]}),
        "unknown": ("return 1", {"reserved": [], "number": []}),
    }
    for language, (code, kinds) in cases.items():
        store_answer(page, f"```{language}\n{code}\n```")
        shown_code = page.locator(".assistant pre code")
        expect(shown_code).to_have_text(code)
        for kind, parts in kinds.items():
            assert shown_code.locator(f".{kind}").all_inner_texts() == parts, (language, kind)


@pytest.mark.parametrize("width", [400, 1280])
def test_settings_cover_no_text(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    store_answer(page, MARKDOWN * 3)
    page.locator("#settings-button").click()
    boxes = [page.locator(name).bounding_box() for name in ("#settings", "#scroll", "#composer")]
    settings, log, composer = ((box["x"], box["y"], box["width"], box["height"]) for box in boxes if box)
    for x, y, w, h in (log, composer):
        assert x + w <= settings[0] or y >= settings[1] + settings[3]
        assert h > 40
    expect(page.locator(".assistant .tools")).to_be_in_viewport()  # the log stays at its end


def test_other_pages_are_offered(page: Page, fleet: Fleet) -> None:
    for name, heading in (("Dashboard", "Decode nodes"), ("API", "pdserve API")):
        link = page.get_by_role("link", name=name)
        expect(link).to_be_visible()
        link.click()
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
        page.goto(fleet.url)


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
    return re.sub(r">\n+|\n+<", lambda match: match[0].strip("\n"), str(page.evaluate(script, text)))


def store_answer(page: Page, text: str, stats: dict[str, Any] | None = None) -> None:
    """Have the page show this text as an answer of a model, in a conversation that the browser kept."""
    messages = [{"role": "user", "content": "How does pdserve split prefill and decode?"}]
    messages.append({"role": "assistant", "content": text, "stats": stats})  # type: ignore[dict-item]
    stored = json.dumps({"id": "1", "updated": 1, "settings": {}, "messages": messages})
    page.evaluate("text => localStorage.setItem('pdserve-chat-1', text)", stored)
    page.reload()
    expect(page.locator("#model")).to_have_value(MODEL_NAME)


MARKDOWN_CASES = [
    ("# a\n###### b", "<h2>a</h2><h6>b</h6>"),
    ("a\nb", "<p>a<br>b</p>"),
    ("**a *b* c** ***d***", "<p><strong>a <em>b</em> c</strong> <em><strong>d</strong></em></p>"),
    ("2 * 3 * 4 snake_case_name", "<p>2 * 3 * 4 snake_case_name</p>"),
    ("- a\n- b\n  1. c\n", "<ul><li>a</li><li>b<ol><li>c</li></ol></li></ul>"),
    ("- a\n\n  d", "<ul><li><p>a</p><p>d</p></li></ul>"),
    ("3. c", '<ol start="3"><li>c</li></ol>'),
    ("- [x] a", "<ul><li>☑ a</li></ul>"),
    (
        "```c\n**x**\n",
        '<span>c</span></figcaption><pre tabindex="0"><code class="language-c">**x**</code></pre></figure>',
    ),
    ("a|b\n-|-:\n1|2", '<div class="wide-table" tabindex="0"><table><thead><tr><th>a</th><th align="right">b</th>'),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    (r"\*a\* `` b`c `` ~~d~~", "<p>*a* <code>b`c</code> <del>d</del></p>"),
    (r"$a_1 + b_2$", "<p>$a_1 + b_2$</p>"),
    (
        "see https://x.example/a_b_c.",
        '<a href="https://x.example/a_b_c" target="_blank" rel="noopener noreferrer">',
    ),
    (
        "![b](https://x.example/b.png)",
        '<a href="https://x.example/b.png" target="_blank" rel="noopener noreferrer">b</a>',
    ),
    ("<b>a</b>\n\n<div>c</div>", "<p>&lt;b&gt;a&lt;/b&gt;</p><p>&lt;div&gt;c&lt;/div&gt;</p>"),
    ("**unclosed `code [link](", "<p>**unclosed `code [link](</p>"),
]


def test_markdown_becomes_elements(page: Page) -> None:
    for text, html in MARKDOWN_CASES:
        assert html in shown(page, text)


def test_markup_of_a_model_stays_text_and_executes_nothing(page: Page) -> None:
    """The fixture asserts that the page loads nothing from other hosts and opens no dialog."""
    store_answer(page, HOSTILE)
    answer = page.locator(".assistant > .text")
    expect(answer).to_contain_text("<script>alert(2)</script>")
    expect(answer.locator("img, script, u, i, b, svg, style, iframe")).to_have_count(0)
    script = "found => found.flatMap(each => each.getAttributeNames())"
    names = set(answer.locator("*").evaluate_all(script))
    assert names <= {"href", "target", "rel", "class", "tabindex", "type", "align"}
    hosts = [link.get_attribute("href") for link in answer.locator("a[href]").all()]
    assert len(hosts) == 3
    assert all(
        str(host).startswith(("https://evil.example/x.png", "https://ok.example/?q=", "https://f.")) for host in hosts
    )
    for link in answer.locator("a:not([href])").all():
        link.click()
    answer.locator("figcaption").hover()


def test_html_that_passes_the_parser_is_sanitized(page: Page, watched: Watched) -> None:
    script = """async (html) => {
      const {default: sanitizer} = await import('/chat/vendor/purify.es.mjs');
      await import('/chat/markdown.js');
      document.body.append(sanitizer.sanitize(html));
      return document.body.lastChild.outerHTML;
    }"""
    html = "<p onclick=alert(1)><img src=x onerror=alert(2)><a href='javascript:alert(3)'></a><script>alert(4)</script>"
    assert page.evaluate(script, html) == "<p><a></a></p>"
    assert all("Content Security Policy" in complaint for complaint in watched.complaints)  # the browser warns, too
    watched.complaints.clear()


def test_only_the_sanitizer_turns_strings_into_markup(page: Page, watched: Watched) -> None:
    page.evaluate("import('/chat/markdown.js')")
    markup = "document.body.innerHTML = '<b>a</b>'"
    policy = "trustedTypes.createPolicy('%s', {})"
    for script in (markup, policy % "dompurify", policy % "other"):
        with pytest.raises(Error, match=r"requires 'TrustedHTML'|already exists|disallowed"):
            page.evaluate(script)
    watched.complaints.clear()  # the browser logs both


def test_pathological_markdown_is_shown(page: Page) -> None:
    """The test takes minutes if one of the units takes quadratic time."""
    script = """async (text) => {
      const target = document.createElement('div');
      (await import('/chat/markdown.js')).showMarkdown(target, text);
      return target.childElementCount;
    }"""
    for unit in ("*a ", "[", "**a_", "`a``", "> ", "- ", "1. ", "|-", "~~a*b_", "<"):
        assert page.evaluate(script, unit * (50_000 // len(unit))) > 0


def test_vendored_libraries_are_the_files_that_their_readme_names() -> None:
    vendor = files("router.chat_page").joinpath("page/vendor")
    rows = re.findall(
        r"^\| `(\S+)` .* `LICENSE\S+` \| `([0-9a-f]{64})` \|$", vendor.joinpath("README.md").read_text(), re.M
    )
    digests = {name: sha256(vendor.joinpath(name).read_bytes()).hexdigest() for name, _ in rows}
    assert digests == dict(rows)
    assert set(digests) == {"marked.esm.js", "purify.es.mjs"}


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_chat_page_fits_small_and_large_windows(
    width: int, scheme: Any, browser: Browser, fleet: Fleet, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(fleet.url)
    expect(page.locator("#dashboard")).to_be_visible()
    page.screenshot(path=tmp_path / f"chat-{width}-{scheme}-empty.png")
    assert accessibility_faults(page) == []
    stats = {"prefillNode": "p-one", "decodeNode": "d-one", "ttft": 0.0312, "tokenRate": 148.2, "outputTokens": 212}
    stats |= {"promptTokens": 1840, "cachedTokens": 1792, "stopped": ""}
    store_answer(page, MARKDOWN, stats)
    page.screenshot(path=tmp_path / f"chat-{width}-{scheme}.png")
    assert accessibility_faults(page) == []
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
    assert accessibility_faults(page) == []
    page.close()
