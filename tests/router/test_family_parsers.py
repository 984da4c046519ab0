"""Tool calls in the formats of single families: read as their chat templates write them, however they are cut up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.chat.families.typed_values import typed_values
from router.text.chat.output_parser import Message, MessageBuilder, OutputParser
from router.text.chat.parsers import TOOL_PARSERS, parser_name, select_parsers
from router.text.chat.template import ChatTemplate, RenderRequest

SCHEMAS: dict[str, Any] = {
    "write": {
        "properties": {
            "path": {"type": "string"},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "ratio": {"$ref": "#/$defs/ratio"},
            "force": {"type": "boolean"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "more": {"type": "object"},
        },
        "$defs": {"ratio": {"type": ["number", "null"]}},
    },
    "stop": None,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in SCHEMAS.items()]
FAMILIES = {  # with the beginning and the end of what the model writes
    "qwen3_coder": ("<|im_start|>assistant", "<|im_end|>\n"),
    "seed_oss": ("<seed:bos>assistant", "<seed:eos>"),
    "glm45": ("<think></think>", ""),
    "minimax_m2": ("]~b]ai\n", "[e~[\n"),
    "deepseek_v3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v31": ("</think>", "<｜end▁of▁sentence｜>"),
    "deepseek_v32": ("</think>", "<｜end▁of▁sentence｜>"),
}
TAGGED = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v32")
TEMPLATES = {
    family: ChatTemplate((Path(__file__).parent / "templates" / f"{family}.jinja").read_text(encoding="utf-8"), {})
    for family in FAMILIES
}


def parse(parser: OutputParser, texts: Sequence[str]) -> Message:
    builder = MessageBuilder()
    for text in texts:
        builder.add(parser.push(text))
    builder.add(parser.flush())
    return builder.message()


def parser_of(family: str, parallel: bool = True) -> OutputParser:
    return TOOL_PARSERS[family].parser(typed_values(SCHEMAS), parallel)


def written(family: str, content: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the output that a template renders for a message with calls."""
    messages: list[Any] = [
        {"role": "user", "content": "Go!"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
        },
    ]
    text = TEMPLATES[family].render(RenderRequest(messages=messages, tools=TOOLS, add_generation_prompt=False))
    begin, end = FAMILIES[family]
    return text[text.index(begin, text.index("Go!")) + len(begin) :].removesuffix(end)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted(position % (len(text) + 1) for position in cuts)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write", {"path": 'a "b"\\c.md', "text": "\n # é日🙂\n\n", "count": -3, "ratio": 0.5, "force": True}),
    ("write", {"path": "7", "text": "true", "lines": [1, 2], "more": {"a": [None, {"b": "</x>"}]}}),
    ("write", {"path": "", "ratio": None, "text": None, "force": False}),
    ("stop", {}),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_as_the_template_writes_them(family: str) -> None:
    text = written(family, "Let me see.", CALLS)
    for texts in ([text], list(text), cut(text, [3, 50, 51, 52, 200])):
        message = parse(parser_of(family), texts)
        assert calls_of(message) == CALLS
        assert message.content.strip() == "Let me see."
    first = parse(parser_of(family, parallel=False), [text])
    assert calls_of(first) == CALLS[:1]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_detected_in_its_template(family: str) -> None:
    assert select_parsers(TEMPLATES[family].source).tools is TOOL_PARSERS[family]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("qwen3_xml", "qwen3_coder"), ("glm47", "glm45"), ("glm-45", "glm45"), ("minimax-m2", "minimax_m2")),
        *(("deepseek_v3", "deepseek_v3"), ("deepseekv31", "deepseek_v31")),
        *(("deepseek_v32", "deepseek_v32"), ("deepseekv32", "deepseek_v32")),
    ],
)
def test_names_of_peers_are_accepted(name: str, family: str) -> None:
    assert parser_name("--tool-call-parser", name.replace("glm-45", "glm45")) == family


strings = st.lists(
    st.sampled_from(
        [
            *(
                "</parameter>",
                "<parameter=x>",
                "</function>",
                "</tool_call>",
                "<tool_call>",
                "</seed:tool_call>",
                "</arg_value>",
                "<arg_key>",
            ),
            *(
                "</minimax:tool_call>",
                "<invoke name=",
                "</｜DSML｜parameter>",
                "<｜DSML｜parameter name=",
                "｜DSML｜",
                '"',
                "\\",
                "\n",
                " ",
                "é🙂",
                "\u2028",
                "a",
                "</",
                "<",
                "{}",
                "null",
            ),
        ]
    ),
    max_size=6,
).map("".join)


def closes(family: str, text: str) -> bool:
    """Whether a value holds the end of a value with what may follow it: then it cannot be told from the end."""
    end, follows = {
        "qwen3_coder": ("</parameter>", r"<parameter=|</function>|</tool_call>|$"),
        "seed_oss": ("</parameter>", r"<parameter=|</function>|</seed:tool_call>|$"),
        "glm45": ("</arg_value>", r"<arg_key>|</tool_call>|$"),
        "minimax_m2": ("</parameter>", r'<parameter name="|</invoke>|</minimax:tool_call>|$'),
        "deepseek_v32": ("</｜DSML｜parameter>", r'<｜DSML｜parameter name="|$'),
    }.get(family, ("", ""))
    return bool(end) and bool(re.search(rf"{end}[ \t\r\n]*({follows})", text))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(text=strings, cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_strings_arrive_verbatim_however_output_is_cut(family: str, text: str, cuts: list[int]) -> None:
    calls: list[tuple[str, Any]] = [("write", {"path": text, "count": 1}), ("write", {"path": text})]
    output = written(family, "", calls)
    whole = parse(parser_of(family), [output])
    assert parse(parser_of(family), cut(output, cuts)) == whole == parse(parser_of(family), list(output))
    if not closes(family, text):
        assert calls_of(whole) == calls


# Pieces of all the formats, right and wrong; "0" … "9" stand nowhere in their syntax.
FRAGMENTS = [
    *("<seed:tool_call>", "</seed:tool_call>"),
    *("<tool_call>", "</tool_call>", "<function=write>", "<function=", "<parameter=path>", "<parameter=count>"),
    *("</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "write", "stop", "path"),
    *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="write">', "</｜DSML｜invoke>"),
    *(
        '<｜DSML｜parameter name="path" string="true">',
        '<｜DSML｜parameter name="count" string="',
        "</｜DSML｜parameter>",
    ),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="write">', '<parameter name="path">', "</invoke>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        "```json\n",
        "\n```",
        "function",
        '{"path": "4"}',
        "{",
        "}",
        "\n",
        "  ",
        "5.6e7",
        "89",
        "é🙂",
        "<",
        "</",
        '"',
        ">",
    ),
]
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(text=outputs, cuts=st.lists(st.integers(0, 500), max_size=12))
def test_broken_output_loses_no_text_and_does_not_depend_on_splits(family: str, text: str, cuts: list[int]) -> None:
    whole = parse(parser_of(family), [text])
    assert parse(parser_of(family), cut(text, cuts)) == whole == parse(parser_of(family), list(text))
    if not whole.calls:
        assert whole.content == text
    kept = whole.content + "".join(call.arguments for call in whole.calls)
    assert sorted(filter(str.isdigit, kept)) == sorted(filter(str.isdigit, text))
    assert kept.count("🙂") == text.count("🙂")


@pytest.mark.parametrize("family", FAMILIES)
def test_output_cut_anywhere_keeps_what_was_written(family: str) -> None:
    text = written(family, "", [("write", {"path": "12345", "lines": [6, 7], "text": "89"})])
    for end in range(len(text)):
        message = parse(parser_of(family), [text[:end]])
        kept = message.content + "".join(call.arguments for call in message.calls)
        assert list(filter(str.isdigit, kept)) == list(filter(str.isdigit, text[:end]))
        for call in message.calls:
            assert call.arguments != "{}", "a call that is cut off does not look complete"


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v31"])
def test_an_empty_list_of_calls_is_text(family: str) -> None:
    text = "<｜tool▁calls▁begin｜>\n<｜tool▁calls▁end｜>"
    assert parse(parser_of(family), [text]).content == text


def test_dsml_says_which_values_are_strings() -> None:
    def message(said: str, value: str) -> Message:
        parameter = f'<｜DSML｜parameter name="text" string="{said}">{value}</｜DSML｜parameter>'
        call = f'<｜DSML｜invoke name="write">{parameter}</｜DSML｜invoke>'
        return parse(parser_of("deepseek_v32"), [f"<｜DSML｜function_calls>{call}</｜DSML｜function_calls>"])

    assert calls_of(message("true", "null")) == [("write", {"text": "null"})]
    assert calls_of(message("false", "null")) == [("write", {"text": None})]
    assert "perhaps" in message("perhaps", "null").content


def malformed(family: str) -> Iterator[str]:
    """Yield long outputs whose text is held, or emitted slowly if each part were compared with all before."""
    number = 500_000
    yield written(family, "", [("write", {"path": "x" * number, "lines": [1] * (number // 3)})])
    yield TOOL_PARSERS[family].markers[0] + "x" * number
    yield TOOL_PARSERS[family].markers[0] + " " * number
    yield "<" * number
    if family in TAGGED:
        ends = "</parameter></function></invoke></tool_call></seed:tool_call></minimax:tool_call></｜DSML｜invoke>x"
        yield written(family, "", [("write", {"path": ends * (number // len(ends))})])
        yield written(family, "", [("write", {"path": "</parameter>\n</arg_value>\n" * (number // 30)})])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "hermes"])
def test_long_outputs_take_linear_time(family: str) -> None:
    """With quadratic time, this takes minutes."""
    texts = (
        ['<tool_call>{"arguments": {"a": "' + "x" * 500_000 + '"}, "name": "write"}</tool_call>']
        if family == "hermes"
        else malformed(family)
    )
    for text in texts:
        parts = [text[at : at + 8] for at in range(0, len(text), 8)]
        message = parse(parser_of(family), parts)
        assert len(message.content) + sum(len(call.arguments) for call in message.calls) > 0.9 * len(text)
