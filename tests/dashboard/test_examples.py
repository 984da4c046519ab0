"""Examples that pages show for the embedded model get right answers: README, docs, and the chat page in a browser."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Fleet, start_fleet
from machine import patience
from playwright.sync_api import expect
from web_pages import Watched

from pdserve.checkpoint.hub import EMBEDDED_MODEL

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST = json.loads((ROOT / "docs" / "first-request.json").read_text())
GREETING = "Hello! I am the small model that comes with pdserve. Give me a text and ask me about it."
KEY = "Clara hid the brass key in the cellar of the lighthouse."
ANSWERS = {FIRST["messages"][0]["content"]: KEY, "Hello": GREETING}
FOLLOW_UPS = {
    "Who bought 14 small candles?": "Mira bought 14 small candles in Bergen.",
    "What is the password?": "Fatima told Otto that the password is WT-2290.",
    "Where did Otto hide the long rope?": "Otto hid the long rope in the barn.",
}


def bodies_of(page: Path) -> Iterator[dict[str, Any]]:
    """Yield the bodies of chats that a page sends with curl or the openai SDK."""
    text = page.read_text()
    for given in re.findall(r"\bcurl [^\n]*(?:\\\n[^\n]*)*? -d (@\S+|'[^']*')", text):
        yield json.loads((ROOT / given[1:]).read_text() if given[0] == "@" else given[1:-1])
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for call in ast.walk(ast.parse(block)) if ".completions.create(" in block else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".completions.create"):
                yield {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}


EXAMPLES = [
    pytest.param(body | {"stream": False}, id=f"{page.stem}: {body['messages'][-1]['content'][-40:]}")
    for page in PAGES
    for body in bodies_of(page)
    if body["model"] == EMBEDDED_MODEL.name
]


@pytest.fixture(scope="module")
def served() -> Iterator[Fleet]:
    """Serve the embedded model as the README does: by its own name, and each prompt is handed off."""
    named = ["--served-model-name", EMBEDDED_MODEL.name]
    handed_off = [*named, "--handoff-min-tokens", "0"]
    with start_fleet(EMBEDDED_MODEL, prefill_flags=named, decode_flags=handed_off, router_flags=named) as fleet:
        yield fleet


def test_pages_have_examples() -> None:
    assert {str(param.id).partition(":")[0] for param in EXAMPLES} >= {"README"}
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("body", EXAMPLES)
def test_example_of_a_page_gets_its_answer(body: dict[str, Any], served: Fleet) -> None:
    response = httpx.post(
        f"{served.url}/v1/chat/completions", json=body, trust_env=False, timeout=patience(30)
    ).raise_for_status()
    assert response.json()["choices"][0]["message"]["content"] == ANSWERS[body["messages"][-1]["content"]]


def test_example_of_the_chat_page_and_its_follow_ups_get_their_answers(served: Fleet, watched: Watched) -> None:
    page = watched.open(served.url)
    expect(page.locator("#toy")).to_be_visible()
    page.locator("#example").click()
    expect(page.locator("#entry")).to_have_value(FIRST["messages"][0]["content"])
    page.keyboard.press("Enter")
    answers = page.locator(".assistant > .text")
    questions = page.locator("#questions button")
    expect(answers).to_have_text([KEY])
    expect(questions).to_have_text([*FOLLOW_UPS])
    for question, answer in FOLLOW_UPS.items():
        page.get_by_role("button", name=question).click()
        expect(answers.last).to_have_text(answer)
        expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#follow-ups")).to_be_hidden()
    assert watched.complaints == []


def test_embedded_model_is_greedy_where_a_request_names_no_temperature(served: Fleet) -> None:
    body = {"model": EMBEDDED_MODEL.name, "prompt": "The", "max_tokens": 16, "n": 8}
    assert len({choice["text"] for choice in served.post("/v1/completions", body)["choices"]}) == 1
