"""Conversations fit the templates that demand a form of messages, as those of published models do."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RequestError
from router.text.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, select_parsers
from router.text.chat.template import ChatTemplate, RenderRequest

USER = {"role": "user", "content": "Go!"}


def calling(*ids: str, **texts: str) -> dict[str, Any]:
    calls = [{"id": key, "type": "function", "function": {"name": key, "arguments": {}}} for key in ids]
    return {"role": "assistant", **texts, "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"{call_id} done"}


def rendered(template: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(template, {}).render(RenderRequest([USER, *messages], False))


NINE = """{% for m in messages %}{% for call in m.tool_calls or [] %}
{%- if call.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}{{ call.id }}:
{%- endfor %}{% if m.role == 'tool' %}
{%- if m.tool_call_id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}{{ m.tool_call_id }};
{%- endif %}{% endfor %}"""  # Mistral 7B v0.3, Nemo, Small 3.2


def test_ids_have_nine_characters_where_the_template_demands_it() -> None:
    long = "call_0123456789abcdef01234567"
    text = rendered(NINE, calling(long, "call0", "abc123XYZ"), *map(result, (long, "call0", "abc123XYZ")))
    first, second, third = text.partition(";")[0].split(":")[:3]
    assert text == f"{first}:{second}:{third}:{first};{second};{third};"
    assert third == "abc123XYZ"
    assert len({first, second, third}) == 3
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in (first, second))


def test_ids_are_kept_where_the_template_takes_any() -> None:
    assert rendered("{{ messages[1].tool_calls[0].id }}", calling("call_0")) == "call_0"


ONE_CALL = """{% for m in messages %}{% if 'tool_calls' in m %}
{%- if not m.tool_calls|length == 1 %}{{ raise_exception('single!') }}{% endif %}
{{- m.tool_calls[0].function.name }};{% else %}{{ m.content }};{% endif %}{% endfor %}"""  # Llama 3.1, 3.2, 3.3


def test_calls_have_a_message_each_where_the_template_takes_one() -> None:
    text = rendered(ONE_CALL, calling("f", "g", "h"), *map(result, "hgf"), {"role": "assistant", "content": "Done."})
    assert text == "Go!;f;f done;g;g done;h;h done;Done.;"


NO_CONTENT = """{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}<{{ call.function.name }}>{% endfor %}
{%- elif m['content'] is not none %}{{ m['content'] }};{% endif %}{% endfor %}"""


def test_calls_beside_content_are_not_lost() -> None:
    source = NO_CONTENT.replace("m[", "message[").replace("for m in", "for message in")  # DeepSeek-R1 and V3, at first
    assert rendered(source, calling("f", "g", content="I look."), result("f")) == "Go!;I look.;<f><g>f done;"
    assert rendered(source, calling("f"), result("f")) == "Go!;<f>f done;"


CHUNKS = """{% for m in messages %}{% if m.content is string %}{{ m.content }};{% else %}{% for block in m.content %}
{%- if block['type'] == 'thinking' %}[THINK]{{ block['thinking'] }}[/THINK]{% else %}{{ block['text'] }}{% endif %}
{%- endfor %};{% endif %}{% endfor %}"""  # Ministral 3


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"content": "Done."}, "Done."),
        ({"reasoning": "Hm.", "content": "Done."}, "[THINK]Hm.[/THINK]Done."),
        ({"reasoning": "Hm."}, "[THINK]Hm.[/THINK]"),
    ],
)
def test_reasoning_is_a_chunk_where_the_template_reads_it_there(texts: dict[str, str], expected: str) -> None:
    assert rendered(CHUNKS, {"role": "assistant", **texts}) == f"Go!;{expected};"


def test_message_with_reasoning_as_a_chunk_is_continued() -> None:
    def continued(**texts: str) -> str:
        messages = [USER, {"role": "assistant", **texts}]
        return ChatTemplate(CHUNKS, {}).render(RenderRequest(messages, False, continue_final_message=True))

    assert continued(reasoning="Hm.", content="It is") == "Go!;[THINK]Hm.[/THINK]It is"
    with pytest.raises(RequestError, match="last message with content"):
        continued(reasoning="Hm.")


@pytest.mark.parametrize(
    ("words", "tools", "reasoning"),
    [
        ("<tool_call> in <tool_calls>[{", None, None),  # Apriel 1.5
        ("<|python_tag|> or <function=NAME>{…}</function>", None, None),  # Functionary 3.1
        ("<|python_tag|>", "llama3_json", None),
        ("<seed:tool_call><function=f><parameter=a> </seed:think>", "seed_oss", "seed_oss"),
    ],
)
def test_format_of_calls_is_not_taken_for_another(words: str, tools: str | None, reasoning: str | None) -> None:
    parsers = select_parsers(words)
    assert parsers.tools is (None if tools is None else TOOL_PARSERS[tools])
    assert parsers.reasoning is (None if reasoning is None else REASONING_PARSERS[reasoning])
