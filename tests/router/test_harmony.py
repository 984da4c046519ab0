"""Outputs of gpt-oss, as messages in channels, become reasoning, calls and content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import patience
from router_process import MODEL, router_process
from scripted_node import ScriptedNode
from tokenizers import AddedToken

from pdserve.grammar import Grammar, GrammarVocabulary
from router.text.chat.families.harmony_grammar import harmony_grammar
from router.text.chat.families.harmony_parser import MARKERS, HarmonyParser
from router.text.chat.output_parser import Message, MessageBuilder
from router.text.chat.output_parsing import select_parsing
from router.text.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, parser_name, select_parsers
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.chat.tool_grammar import Marker
from router.text.chat.tools import ToolUse, tool_use
from router.text.structured.structured_outputs import json_schema_grammar
from router.text.structured.work_budget import Budget

TEMPLATE = ChatTemplate((Path(__file__).parent / "templates" / "gpt_oss.jinja").read_text(encoding="utf-8"), {})
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def parse(texts: Sequence[str], **how: Any) -> Message:
    parser = HarmonyParser(["f", "g"], **how)
    builder = MessageBuilder()
    for text in texts:
        builder.add(parser.push(text))
    builder.add(parser.flush())
    return builder.message()


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Hello \n", "Hm.", "Hello \n", []),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Hello<|return|>", "Hm.", "Hello", []),
        ("<|channel|>final<|message|>Hello", "", "Hello", []),
        (f'{ANALYSIS}f!<|end|>{CALL}{{"a": 1}}<|call|>', "f!", "", [("f", '{"a": 1}')]),
        (" to=functions.g<|channel|>commentary json<|message|>{}<|call|>", "", "", [("g", "{}")]),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "a\nb", "c", []),
        (f"{ANALYSIS}a{FINAL}c", "a", "c", []),  # the end is missing
        ("<|channel|>commentary<|message|>I look.<|end|>" + CALL + "{}", "", "I look.", [("f", "{}")]),
        (f"{CALL}<|call|>", "", "", [("f", "{}")]),
        (f'{CALL}{{"a": "long', "", "", [("f", '{"a": "long')]),
        (f"{ANALYSIS}never ends <|en", "never ends <|en", "", []),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>fin", "Hm.", "", []),
        ("plain text", "", "plain text", []),
        ("assistant: <|end|> 5", "", "assistant: <|end|> 5", []),
        ("<|channel|>other<|message|>x", "", "x", []),
        (CALL.replace("f ", "none ") + "{}", "", CALL.replace("f ", "none ") + "{}", []),
        (CALL.replace("functions.f", "python") + "1", "", CALL.replace("functions.f", "python") + "1", []),
    ],
)
def test_messages_are_read_by_channel(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    for texts in ([text], list(text)):
        message = parse(texts)
        assert (message.reasoning, message.content) == (reasoning, content)
        assert [(call.name, call.arguments) for call in message.calls] == calls


def test_calls_are_read_as_the_template_writes_them() -> None:
    arguments = {"a": 'é "x" <|x|>', "b": [1, {"c": None}]}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[Any] = [
        {"role": "user", "content": "Go!"},
        {"role": "assistant", "content": "", "reasoning": "First f.", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = TEMPLATE.render(RenderRequest(messages=messages, tools=tools, add_generation_prompt=False))
    prompt = TEMPLATE.render(RenderRequest(messages=messages[:1], tools=tools))
    assert text.startswith(prompt)
    message = parse([text.removeprefix(prompt)])
    assert (message.reasoning, message.content) == ("First f.", "")
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("f", arguments)]


def test_family_is_detected_in_its_template_and_by_the_names_of_peers() -> None:
    parsers = select_parsers(TEMPLATE.source)
    assert (parsers.tools, parsers.reasoning) == (TOOL_PARSERS["openai"], REASONING_PARSERS["openai_gptoss"])
    assert parser_name("--tool-call-parser", "gpt-oss") == "openai"
    assert parser_name("--reasoning-parser", "gpt-oss") == "openai_gptoss"


def test_plain_chat_is_parsed_and_a_continued_one_goes_on_with_its_answer() -> None:
    parsers = select_parsers(TEMPLATE.source)
    for continued, text in ((None, f"{ANALYSIS}Hm.<|end|>{FINAL}Hello"), ("He", "llo")):
        state = parsers.state_after("<|start|>assistant" if continued is None else "…He", continued)
        parsing = select_parsing(ToolUse(), parsers, state, include_reasoning=True)
        assert parsing is not None
        builder = MessageBuilder()
        parser = parsing.new_parser()
        builder.add([*parser.push(text), *parser.flush()])
        assert builder.message().content == ("Hello" if continued is None else "llo")


def test_reasoning_that_is_not_separated_is_content() -> None:
    assert parse([f"{ANALYSIS}Hm.<|end|>{FINAL}Hello"], separated=False).content == "Hm.\nHello"


FRAGMENTS = [
    *(*MARKERS, "assistant", " to=functions.f", "analysis", "commentary", "final", " ", "json", "\n", "é🙂", "<|", "{"),
    *(ANALYSIS, FINAL, CALL, '{"a": "4"}', "5.6e7", "89"),
]


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), cuts=st.lists(st.integers(0, 500), max_size=9)
)
def test_broken_output_loses_no_text_and_does_not_depend_on_splits(text: str, cuts: list[int]) -> None:
    ends = sorted(position % (len(text) + 1) for position in cuts)
    parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = parse([text])
    assert parse(parts) == whole == parse(list(text))
    written = whole.reasoning + whole.content + "".join(call.arguments for call in whole.calls)
    for character in "456789🙂":
        assert written.count(character) == text.count(character)


# ---------------------------------------------------------------- grammars

ADD: Any = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "integer"}}}},
}
ANY: Any = {"type": "function", "function": {"name": "g"}}
ANSWER = json_schema_grammar({"enum": ["yes"]}, Budget())
THOUGHT = f"{ANALYSIS}Hm {{<|end|><|start|>assistant"
FORM = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s"
PLAIN = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("choice", "answer", "allowed", "refused"),
    [
        (
            "required",
            None,
            [FORM % ("f", '{"a": 1}')],
            [FORM % ("f", '{"b": 1}'), FORM % ("g", '{"b": 1}'), PLAIN + "Hi"],
        ),
        ({"type": "function", "function": {"name": "f"}}, None, [FORM % ("f", "{}")], [FORM % ("g", "{}")]),
        (
            "auto",
            "",
            [FORM % ("f", '{"a": 1}'), FORM % ("g", '{"b": 1}'), PLAIN + "Hi"],
            [FORM % ("f", '{"b": 1}'), "Hi"],
        ),
        (
            "auto",
            ANSWER,
            [FORM % ("f", '{"a": 1}'), PLAIN + '"yes"'],
            [PLAIN + "Hi", '"yes"', FORM % ("f", '{"b": 1}')],
        ),
        ("none", ANSWER, [PLAIN + '"yes"'], [FORM % ("f", '{"a": 1}')]),
    ],
)
def test_output_is_held_inside_its_channels(
    choice: Any, answer: str | None, allowed: list[str], refused: list[str]
) -> None:
    backend = small_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    end: int = backend.token_to_id("<|im_end|>") or 0
    vocabulary = GrammarVocabulary(backend.to_str(), eos_token_ids=[end])
    grammar = harmony_grammar(
        tool_use([ADD, ANY], choice, True),
        lambda text: Marker(text, backend.token_to_id(text)),
        answer,
        Budget(),
    )

    def allows(text: str) -> bool:
        matcher = Grammar(grammar, vocabulary).matcher()
        for token_id in [*backend.encode(text, add_special_tokens=False).ids, end]:
            if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
                return False
            matcher.consume([token_id])
        return True

    for text in allowed:
        assert allows(text), text
        assert allows(THOUGHT + text), text
    for text in refused:
        assert not allows(text), text
        assert not allows(THOUGHT + text), text


def test_router_reads_and_holds_channels(reading_dir: Path, scripted_node: ScriptedNode, say_text: Any) -> None:
    template = Path(__file__).parent / "templates" / "gpt_oss.jinja"
    flags = ["--decode", scripted_node.address, "--chat-template", str(template)]
    with router_process(reading_dir, flags) as router:

        def ask(text: str, **fields: Any) -> tuple[dict[str, Any], str]:
            """Return the message, and the grammar that the node got."""
            extra = say_text(text)["extra_body"]
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **extra, **fields}
            url = f"{router.url}/v1/chat/completions"
            response = httpx.post(url, json=body, timeout=patience(20), trust_env=False)
            assert response.status_code == 200, response.text
            held = scripted_node.seen[extra["cache_salt"]].message.sampling.grammar
            return response.json()["choices"][0]["message"], held

        message, held = ask(f"{ANALYSIS}Hm.<|end|>{FINAL}Hello")
        assert (message["reasoning"], message["content"], held) == ("Hm.", "Hello", "")
        message, held = ask(THOUGHT + FORM % ("f", '{"a": 1}'), tools=[ADD, ANY], tool_choice="required")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
        assert "final" not in held
        assert "functions.g" in held
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
        message, held = ask(f'{PLAIN}"yes"', response_format=form)
        assert message["content"] == '"yes"'
        assert "@answer" in held
        message, held = ask("llo", continue_final_message=True, messages=[{"role": "assistant", "content": "He"}])
        assert message["content"] == "llo"
