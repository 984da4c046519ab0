"""Tool calls and reasoning are found in text however it is cut up, and nothing is lost where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.chat.families.typed_values import typed_values
from router.text.chat.output_parser import Message, MessageBuilder, OutputDelta, OutputParser
from router.text.chat.parsers import TOOL_PARSERS, parser_name
from router.text.chat.reasoning_parser import ReasoningParser, Thinking
from router.text.chat.tool_parsers import NamedToolParser, RequiredToolParser

NAMES = ("f", "get_weather")
FUNCTIONS = typed_values(dict.fromkeys(NAMES))
HERMES, LLAMA, MISTRAL = (TOOL_PARSERS[name].parser for name in ("hermes", "llama3_json", "mistral"))

THINK, OPENED = (Thinking("<think>", "</think>", opened) for opened in (False, True))

PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": lambda: HERMES(FUNCTIONS, True),
    "llama": lambda: LLAMA(FUNCTIONS, True),
    "mistral": lambda: MISTRAL(FUNCTIONS, True),
    "list": lambda: RequiredToolParser(NAMES),
    "named": lambda: NamedToolParser(["f"]),
    "one call": lambda: HERMES(FUNCTIONS, False),
    "think": lambda: ReasoningParser(THINK),
    "opened": lambda: HERMES(FUNCTIONS, True, OPENED),
    "think and call": lambda: LLAMA(FUNCTIONS, True, THINK),
}


def join_deltas(deltas: list[OutputDelta]) -> Message:
    builder = MessageBuilder()
    builder.add(deltas)
    return builder.message()


def parse(parser: OutputParser, texts: Sequence[str]) -> Message:
    pieces = [piece for text in texts for piece in parser.push(text)]
    return join_deltas([*pieces, *parser.flush()])


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.calls]


F = ("f", '{"a": 1}')
W = ("get_weather", '{"city": "Zürich }]", "days": [1, {"x": "\\""}]}')

FOUND: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n<tool_call>\n'
        f'{{"name": "get_weather", "id": 5, "arguments": {W[1]}}}\n</tool_call>\n',
        "Let me see.",
        [F, W],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> Done.', "Done.", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\\', "", [("f", '{"a": "1\\')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} and so on', "and so on", [F]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "5"}</tool_call>', None, []),
    ("hermes", "<tool_call>", None, []),
    ("hermes", "a <tool_call", None, []),
    ("hermes", "  plain text \n", None, []),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}', "", [F, F]),
    (
        "llama",
        '\n{"name": "f", "parameters": {"a": 1}}\n{"type": "function", "name": "f", "parameters": {"a": 1}}',
        "",
        [F, F],
    ),
    ("llama", '{"name": "Bob", "age": 5}', None, []),
    ("llama", 'Here: {"name": "f", "parameters": {}}', None, []),
    ("llama", '<|python_tag|>print("hi")', None, []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]',
        "",
        [F, F],
    ),
    ("mistral", f"Sure.[TOOL_CALLS]f{F[1]}[TOOL_CALLS]get_weather{W[1]}", "Sure.", [F, W]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [F]),
    ("mistral", '[TOOL_CALLS]g{"a": 1}', None, []),
    ("list", '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]', "", [F, F]),
    ("named", '{"a": 1}', "", [F]),
    ("one call", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 3, "", [F]),
]


@pytest.mark.parametrize(("parser", "text", "content", "wanted"), FOUND)
def test_tool_parser_finds_calls(parser: str, text: str, content: str | None, wanted: list[tuple[str, str]]) -> None:
    for texts in ([text], list(text)):
        message = parse(PARSERS[parser](), texts)
        assert calls(message) == wanted
        assert message.content == (text if content is None else content)


@pytest.mark.parametrize(
    ("flag", "text", "name"),
    [
        ("--reasoning-parser", "deepseek-r1", "think"),
        ("--reasoning-parser", "qwen3_thinking", "think"),
        ("--tool-call-parser", "qwen25", "hermes"),
        ("--tool-call-parser", "llama3-json", "llama3_json"),
    ],
)
def test_names_of_peers_are_translated(flag: str, text: str, name: str) -> None:
    assert parser_name(flag, text) == name


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        ("think", "<think>\nHm.\n\nYes.\n</think>\n\nHello \n", "Hm.\n\nYes.", "Hello \n"),
        ("think", "  Hello <think>no</think>", "", "  Hello <think>no</think>"),
        ("think", "<think>never ends </thin", "never ends </thin", ""),
        ("think", "<think></think>a", "", "a"),
        ("think", "<thin", "", "<thin"),
        ("opened", "\nHm.</think>a", "Hm.", "a"),
        ("opened", "Hm.", "Hm.", ""),
    ],
)
def test_reasoning_is_split_off(parser: str, text: str, reasoning: str, content: str) -> None:
    for texts in ([text], list(text)):
        message = parse(PARSERS[parser](), texts)
        assert (message.reasoning, message.content, message.calls) == (reasoning, content, [])


def test_call_after_reasoning_is_parsed() -> None:
    text = '<think>\nf is best\n</think>\n\n{"name": "f", "parameters": {"a": 1}}'
    message = parse(PARSERS["think and call"](), [text])
    assert (message.reasoning, message.content, calls(message)) == ("f is best", "", [F])


def test_name_is_emitted_before_the_arguments() -> None:
    pieces = PARSERS["hermes"]().push('<tool_call>{"name": "f", "arguments": {"a": "long')
    assert calls(join_deltas(pieces)) == [("f", '{"a": "long')]


# Pieces of all the formats, right and wrong; "0" … "9" stand nowhere in their syntax.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name": "g"}', 'f{"x": [2]}'),
    *('{"name": "f", ', '"arguments": {"b": "3\\"', '"name":', "{", "}", "[", "]", '"', "\\", ",", ";", ":"),
    *("4", "\n", " ", "\t\n ", "f", "é日🙂", "<", "null", "5.6e7", "the quick 89"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted(position % (len(text) + 1) for position in cuts)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("parser", PARSERS)
@given(text=texts, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_result_does_not_depend_on_text_splits(parser: str, text: str, cuts: list[int]) -> None:
    make = PARSERS[parser]
    whole = parse(make(), [text])
    assert parse(make(), cut(text, cuts)) == whole
    assert parse(make(), list(text)) == whole


@pytest.mark.parametrize("parser", ["hermes", "llama", "mistral", "list"])
@given(text=texts)
def test_malformed_call_is_content(parser: str, text: str) -> None:
    message = parse(PARSERS[parser](), [text])
    if message.calls:
        rest = iter(text)  # nothing is made up, and the order stays
        assert all(character in rest for character in message.content)
    else:
        assert message.content == text
