"""Published chat templates: their families' parsers are detected, read what they render, and sessions go on.

Templates are their publishers' and not part of this repository. CHAT_TEMPLATES names a folder of them, one file
NAME.jinja each, such as chat_template.jinja of zai-org/GLM-4.6 as GLM-4.6.jinja.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from test_family_parsers import CALLS, SCHEMAS, cut, parse
from test_tool_grammars import EOS, allows
from tokenizers import AddedToken

from pdserve.grammar import GrammarVocabulary
from router.text.chat.output_parser import Message
from router.text.chat.output_parsing import select_parsing
from router.text.chat.parsers import TOOL_PARSERS, select_parsers
from router.text.chat.strict_tools import Frame
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.chat.tool_grammar import Marker
from router.text.chat.tools import tool_use
from router.text.structured.work_budget import Budget

FOLDER = Path(os.environ.get("CHAT_TEMPLATES", "/nonexistent"))
FILES = sorted(FOLDER.glob("*.jinja"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILES, reason="CHAT_TEMPLATES names no templates")]

PARAMETERS = {name: {"type": "object", "properties": {}, **(schema or {})} for name, schema in SCHEMAS.items()}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
#: Tokens that end an output.
ENDS = ("<|im_end|>", "[e~[", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>", "<|call|>")
USER = {"role": "user", "content": "Go!"}


def assistant(calls: list[tuple[str, dict[str, Any]]], **texts: str) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    numbered = [{"id": f"call{index}", "type": "function", "function": f} for index, f in enumerate(functions)]
    return {"role": "assistant", **texts, "tool_calls": numbered}


def rendered(template: ChatTemplate, messages: list[Any], generate: bool) -> str:
    return template.render(RenderRequest(messages=messages, tools=TOOLS, add_generation_prompt=generate))


def output(template: ChatTemplate, message: dict[str, Any]) -> tuple[str, str]:
    """Return a prompt and the output that makes the message, as the template writes it."""
    prompt = rendered(template, [USER], True)
    text = rendered(template, [USER, message], False)
    differing = (at for at, (one, other) in enumerate(zip(prompt, text, strict=False)) if one != other)
    written = text[next(differing, len(prompt)) :]
    ends = [at for end in ENDS if (at := written.rfind(end)) > 0]
    return prompt, written[: min(ends)] if ends else written


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_calls_are_read_whole_and_in_pieces(path: Path) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"})
    parsers = select_parsers(template.source)
    assert parsers.tools, "a tool parser is detected"
    calls = CALLS[:1] if parsers.use_channels else CALLS  # one call an output, and one text before it
    texts = {"content": "Let me see."} | ({} if parsers.use_channels else {"reasoning": "Hm."})
    prompt, text = output(template, assistant(calls, **texts))
    parsing = select_parsing(tool_use(TOOLS, "auto", True), parsers, parsers.state_after(prompt), True)
    assert parsing is not None

    def message(texts: list[str]) -> Message:
        return parse(parsing.new_parser(), texts)

    whole = message([text])
    assert message(list(text)) == message(cut(text, [3, 50, 51, 52, 200])) == whole
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    said = f"{whole.reasoning or ''} {whole.content}"
    assert " ".join(said.split()) == ("Let me see." if "Hm." not in text else "Hm. Let me see.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sessions_with_results_go_on(path: Path) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"})
    results = [{"role": "tool", "tool_call_id": f"call{index}", "content": f"done{index}"} for index in range(2)]
    turn = [assistant(CALLS[:2], content="I write.", reasoning="Hm."), *results]
    text = rendered(template, [{"role": "system", "content": "Be brief."}, USER, *turn], True)
    assert all(part in text for part in ("Be brief.", "I write.", "done0", "done1", "c.md", "lines"))
    answer = {"role": "assistant", "content": "It is written."}
    assert "It is written." in rendered(template, [USER, *turn, answer, USER], True)
    assert "done1" in rendered(template, [USER, {"role": "assistant", "reasoning": "Hm."}, USER, *turn], True)


@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grammar_allows_the_calls_that_the_template_writes(path: Path, added: bool) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"})
    parsers = select_parsers(template.source)
    assert parsers.tools
    backend = small_tokenizers.byte_level()
    if added:
        tags = dict.fromkeys(tag for form in TOOL_PARSERS.values() for tag in form.markers)
        backend.add_tokens([AddedToken(tag, special=False) for tag in tags])
    if parsers.use_channels:
        pytest.skip("the grammar holds outputs to the other of harmony's two forms of a call")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    use = tool_use(strict, "auto", True)
    calls = [("write", {"path": "a b.md", "count": -3, "lines": [1, 2]})]
    _, text = output(template, assistant(calls, content="Let me see."))
    text = text.partition("</think>")[2] or text
    grammar = parsers.tools.grammar(use, lambda tag: Marker(tag, backend.token_to_id(tag)), Frame(), Budget())
    assert allows(GrammarVocabulary(backend.to_str(), eos_token_ids=[EOS]), grammar, text, backend)
