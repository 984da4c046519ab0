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
from router.text.chat.parsers import TOOL_PARSERS, ModelParsers, select_parsers
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
ENDS = (
    *("<|im_end|>", "[e~[", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>", "<|call|>", "<eos>", "<|eot_id|>"),
    *("<|eom_id|>", "<|end_of_text|>", "[|endofturn|]", "<seed:eos>", "<sep>"),
)
#: Formats of calls without a parser, by a text of their templates.
UNREAD = {
    "<|tool_call_begin|>": "Kimi K2",
    "<|tool_call>": "Gemma 4",
    "<|tool_call_start|>": "LFM2",
    "<|tool_call|>": "Granite 3, Phi-4-mini",
    "<|START_ACTION|>": "Command R7B",
    "Action:": "Command R+",
    "<|tools_prefix|>": "Apertus",
    "<TOOLCALL>": "Nemotron Nano v2",
    "<tool_calls>": "Apriel",
    "<function=": "Functionary 3.1",
    ">>>": "Functionary 3.2",
    "functools[": "Firefunction",
    "<|tool_calls|>": "Solar",
    "function call": "GigaChat 3",
}
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
    start = next(differing, len(prompt))
    tag = text.rfind("<", 0, start)
    written = text[start if ">" in text[tag:start] or tag < 0 else tag :]
    ends = [at for end in ENDS if (at := written.rfind(end)) > 0]
    return prompt, written[: min(ends)] if ends else written


def one_output(template: ChatTemplate, **texts: str) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Return a prompt, an output and its calls. Some templates write each call, and each text, as an output."""
    for calls, said in ((CALLS, texts), (CALLS[:1], texts), (CALLS[:1], {})):
        prompt, text = output(template, assistant(calls, **said))
        if calls[0][0] in text and not any(end in text for end in ENDS):
            break
    return prompt, text, calls


def parsers_of(template: ChatTemplate) -> ModelParsers:
    """Return the parsers of a template; the test ends where it has no calls, or has them in a format without one."""
    parsers = select_parsers(template.source)
    if "tool_calls" not in template.source:
        pytest.skip("the template renders no calls")
    if not parsers.tools:
        unread = [name for sign, name in UNREAD.items() if sign in template.source]
        assert unread, "a tool parser is detected"
        pytest.skip(f"no parser reads the calls of {unread[0]}")
    return parsers


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_calls_are_read_whole_and_in_pieces(path: Path) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"})
    parsers = parsers_of(template)
    state = parsers.state_after(rendered(template, [USER], True))
    reasoned = parsers.use_channels or state.markers is None
    texts = {"content": "Let me see."} | ({} if reasoned else {"reasoning": "Hm."})
    prompt, text, calls = one_output(template, **texts)
    if parsers.reasoning and state.markers is None:
        text = text.removeprefix(parsers.reasoning.end)
    parsing = select_parsing(tool_use(TOOLS, "auto", True), parsers, parsers.state_after(prompt), True)
    assert parsing is not None

    def message(texts: list[str]) -> Message:
        return parse(parsing.new_parser(), texts)

    whole = message([text])
    assert message(list(text)) == message(cut(text, [3, 50, 51, 52, 200])) == whole
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    said = f"{whole.reasoning or ''} {whole.content}"
    assert " ".join(said.split()) == " ".join(part for part in ("Hm.", "Let me see.") if part in text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sessions_with_results_go_on(path: Path) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"})
    parsers_of(template)
    results = [{"role": "tool", "tool_call_id": f"call{index}", "content": f"done{index}"} for index in range(2)]
    turn = [assistant(CALLS[:2], content="I write.", reasoning="Hm."), *results]
    text = rendered(template, [{"role": "system", "content": "Be brief."}, USER, *turn], True)
    # Mistral's older templates write the system message only before a message of the user that is the last one.
    system = () if "loop.last and system_message" in template.source else ("Be brief.",)
    assert all(part in text for part in (*system, "done0", "done1", "c.md", "lines"))
    alone = rendered(template, [USER, assistant(CALLS[:1], content="I write.")], False)
    assert ("I write." in text) == ("I write." in alone), "some templates drop the content of any message with calls"
    answer = {"role": "assistant", "content": "It is written."}
    assert "It is written." in rendered(template, [USER, *turn, answer, USER], True)
    assert "done1" in rendered(template, [USER, {"role": "assistant", "reasoning": "Hm."}, USER, *turn], True)


@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grammar_allows_the_calls_that_the_template_writes(path: Path, added: bool) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<bos>", "eos_token": "<eos>"})
    parsers = parsers_of(template)
    assert parsers.tools is not None
    backend = small_tokenizers.byte_level()
    if added:
        tags = dict.fromkeys(tag for form in TOOL_PARSERS.values() for tag in form.markers)
        backend.add_tokens([AddedToken(tag, special=False) for tag in tags])
    if parsers.use_channels:
        pytest.skip("the grammar holds outputs to the other of harmony's two forms of a call")
    if "[ARGS]" in template.source and not added:
        pytest.skip("Mistral's tokenizers have its tags as tokens")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    use = tool_use(strict, "auto", True)
    calls = [("write", {"path": "a b.md", "count": -3, "lines": [1, 2]})]
    _, text = output(template, assistant(calls, content="Let me see."))
    text = text.partition("</think>")[2] or text.partition("</seed:think>")[2] or text
    grammar = parsers.tools.grammar(use, lambda tag: Marker(tag, backend.token_to_id(tag)), Frame(), Budget())
    assert allows(GrammarVocabulary(backend.to_str(), eos_token_ids=[EOS]), grammar, text, backend)
