"""Chat templates render what transformers renders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import transformers

from pdserve.errors import CheckpointError, ConfigError, RequestError
from router.options import parse_options
from router.server import load_tokenizer
from router.text.chat.messages import check_messages
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello <there> & 'you'"}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "naïve 日本 🙂"}],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\n2", "name": "bot"},
        {"role": "user", "content": "And\n\nmore?"},
    ],
    "reasoning": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because.", "reasoning": "It is so."},
    ],
    "exotic": [
        {"role": "user", "content": "a<b", "meta": {"z": [1, "é"], "a": {"b": None}}},
        {"role": "skip", "content": "not this"},
        {"role": "assistant", "content": None},
        {"role": "stop", "content": "nor that"},
    ],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = small_tokenizers.write(tmp_path_factory.mktemp("chat"), small_tokenizers.byte_level(), **TOKENS)
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", ["llama3", "qwen3", "mistral", "chatml", "exotic"])
def test_templates_render_as_in_transformers(reference: Any, template: str, conversation: str, generate: bool) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    messages = CONVERSATIONS[conversation]
    try:
        expected = reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=generate
        )
    except Exception as exc:
        with pytest.raises(RequestError, match=re.escape(str(exc))):
            ChatTemplate(source, TOKENS).render(RenderRequest(messages, generate))
    else:
        assert ChatTemplate(source, TOKENS).render(RenderRequest(messages, generate)) == expected


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "<b>", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("end", ["2", "Sure, ", " x\n\n"])
@pytest.mark.parametrize("template", ["llama3", "qwen3", "mistral", "chatml"])
def test_continued_messages_and_tools_render_as_in_transformers(reference: Any, template: str, end: str) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": end}]
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True, tools=[TOOL]
    )
    rendered = ChatTemplate(source, TOKENS).render(
        RenderRequest(messages, False, tools=[TOOL], continue_final_message=True)
    )
    assert rendered == expected


def test_template_that_needs_content_gets_empty_content_for_tool_calls() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}", {})
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert (
        template.render(RenderRequest([{"role": "user", "content": "Do."}, calling], False)) == "user:Do.;assistant:;"
    )


CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}


@pytest.mark.parametrize(
    "written", ["m.tool_calls[0].function.arguments", "m.tool_calls[0].function.arguments | tojson"]
)
def test_arguments_are_an_object_that_concatenates_as_json(written: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ '>' + " + written + " + '<' }}{% endfor %}", {})
    message = {"role": "assistant", "tool_calls": [CALL]}
    assert template.render(RenderRequest([message], False)) == '>{"a": "é"}<'


@pytest.mark.parametrize("test", ["m['content'] is none", "m.content is none", "m.content is not none"])
def test_calls_without_content_have_null_where_the_template_tests_it(test: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ " + test + " }}{% endfor %}", {})
    message = {"role": "assistant", "tool_calls": [CALL]}
    assert template.render(RenderRequest([message], False)) == str("not" not in test)


def test_reasoning_without_content_is_rendered_by_templates_that_need_content() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}", {})
    messages = [{"role": "user", "content": "Do."}, {"role": "assistant", "reasoning": "Hm."}]
    assert template.render(RenderRequest(messages, False)) == "user:Do.;assistant:;"


def test_harmony_has_one_call_per_message_and_one_text_before_it() -> None:
    template = ChatTemplate((TEMPLATES / "gpt_oss.jinja").read_text(), {})
    calls: list[dict[str, Any]] = [
        {"id": key, "type": "function", "function": {"name": key, "arguments": {}}} for key in ("f", "g")
    ]
    results = [{"role": "tool", "tool_call_id": key, "content": f"{key} done"} for key in ("g", "f")]
    turn = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": calls}
    text = template.render(RenderRequest([{"role": "user", "content": "Go!"}, turn, *results], False))
    said = text[text.index("Go!") :]
    parts = ("Hm.", "I look.", "functions.f", "f done", "functions.g", "g done")
    assert [said.count(part) for part in parts] == [1] * len(parts)
    assert sorted(parts, key=said.index) == list(parts)


def test_message_without_content_cannot_be_continued() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", {}
    )
    with pytest.raises(RequestError, match="last message with content"):
        template.render(RenderRequest([{"role": "user", "content": None}], False, continue_final_message=True))
    with pytest.raises(RequestError, match="leaves the last message out"):
        template.render(RenderRequest([{"role": "assistant", "content": "a"}], False, continue_final_message=True))


def test_developer_role_becomes_system_if_unknown_to_the_template() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(RenderRequest(messages)) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", {}).render(RenderRequest(messages)) == "developer"


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"date_string": "1 Jan 2000"}])
def test_variables_reach_the_template(reference: Any, variables: dict[str, Any]) -> None:
    template = "qwen3" if "enable_thinking" in variables else "llama3"
    source = (TEMPLATES / f"{template}.jinja").read_text()
    messages = CONVERSATIONS["system"]
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True, **variables
    )
    assert ChatTemplate(source, TOKENS).render(RenderRequest(messages, True, variables)) == expected


def test_template_of_a_file_replaces_the_checkpoints(tmp_path: Path) -> None:
    directory = small_tokenizers.write(
        tmp_path / "model", small_tokenizers.byte_level(), **{**TOKENS, "chat_template": small_tokenizers.CHATML}
    )
    options = parse_options([str(directory), "--chat-template", str(TEMPLATES / "llama3.jinja")])
    template = load_tokenizer(str(directory), options.chat_template).chat_template
    assert template is not None
    assert template.source == (TEMPLATES / "llama3.jinja").read_text()
    (broken := tmp_path / "broken.jinja").write_text("{% if")
    with pytest.raises(CheckpointError, match=r"broken\.jinja"):
        load_tokenizer(str(directory), str(broken))
    with pytest.raises(ConfigError, match="single model"):
        parse_options(["--model", "a=m", "--model", "b=n", "--chat-template", "x"])


def test_chat_token_ids_equal_transformers(reference: Any, tmp_path: Path) -> None:
    config = {**TOKENS, "chat_template": small_tokenizers.CHATML}
    directory = small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), **config)
    tokenizer = Tokenizer.load(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    messages = CONVERSATIONS["turns"]
    assert tokenizer.chat_template is not None
    ours = tokenizer.encode(tokenizer.chat_template.render(RenderRequest(messages)), add_special_tokens=False)
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_byte_order_mark_is_not_part_of_a_template(tmp_path: Path) -> None:
    directory = small_tokenizers.write(tmp_path / "model", small_tokenizers.byte_level(), **TOKENS)
    (directory / "chat_template.jinja").write_text("\ufeff{{ messages[0].content }}")
    template = load_tokenizer(str(directory)).chat_template
    assert template is not None
    assert template.source == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ messages[99].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% include 'x' %}",
    ],
)
def test_forbidden_template_operation_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        ChatTemplate(source, {}).render(RenderRequest(CONVERSATIONS["one"]))
    assert caught.value.param == "messages"


def test_template_syntax_error_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        assert ChatTemplate("{% if %}", {}).compiled


def test_jinja_file_takes_precedence_over_the_config(tmp_path: Path) -> None:
    small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = Tokenizer.load(tmp_path).chat_template
    assert template is not None
    assert template.render(RenderRequest(CONVERSATIONS["one"])) == "file"


TOOL_USE = """
{%- macro name(tool) %}{{ tool.function.name if tool is mapping else name(tool[0]) }}{% endmacro -%}
tools {{ name([tools[0]]) }}
"""


def test_tool_use_template_renders_requests_with_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": TOOL_USE}, {"name": "default", "template": "\n{{ bos_token }} default\n"}]
    small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), chat_template=named, bos_token="<|begin|>")
    template = Tokenizer.load(tmp_path).chat_template
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert template is not None
    cases: Any = [(None, "\n<|begin|> default"), ([TOOL], "tools f")]
    for tools, said in cases:
        assert theirs.apply_chat_template(CONVERSATIONS["one"], tools=tools, tokenize=False) == said
        assert template.render(RenderRequest(CONVERSATIONS["one"], tools=tools)) == said
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    template = Tokenizer.load(tmp_path).chat_template
    assert template is not None
    assert template.render(RenderRequest(CONVERSATIONS["one"])) == "file"
    assert template.render(RenderRequest(CONVERSATIONS["one"], tools=[TOOL])) == "tools f"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_type_of_a_call_may_be_null() -> None:
    call = {"id": "1", "type": None, "function": {"name": "f", "arguments": "{}"}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["type"] == "function"


@pytest.mark.parametrize("text", ['{"a": "b', "[1]", "{]"])
def test_broken_arguments_of_the_model_come_back_as_an_object(text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": text}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, r"messages\[0\].role"),
        ({"role": "user", "content": 5}, r"messages\[0\].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "without text"),
        ({"role": "user", "content": ["x"]}, "str"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls"),
    ],
)
def test_error_names_the_malformed_message(message: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_messages([message])
