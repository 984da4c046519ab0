"""Outputs that have to be tool calls: what their grammars allow, and what clients get."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import small_tokenizers
from fleet import MODEL_NAME, Fleet
from machine import patience
from router_process import MODEL as SCRIPTED
from router_process import RouterProcess
from scripted_node import ScriptedNode
from tokenizers import AddedToken, Tokenizer

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary, from_regex
from router.completions_api.request_bodies import parse_chat
from router.text.chat.families.typed_values import typed_values
from router.text.chat.output_parser import DeltaKind
from router.text.chat.parsers import TOOL_PARSERS
from router.text.chat.strict_tools import Frame, Reasoning, calls_or_answer
from router.text.chat.tool_grammar import Marker, after_reasoning, tool_call_grammar
from router.text.chat.tools import tool_use
from router.text.structured.structured_outputs import json_schema_grammar
from router.text.structured.work_budget import Budget

COLOUR = {"enum": ["red", "green"]}
PAINT: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "properties": {"colour": {"$ref": "#/$defs/colour"}, "again": {"type": "boolean"}},
            "required": ["colour", "again"],
            "additionalProperties": False,
            "$defs": {"colour": COLOUR},
        },
    },
}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
NAMED: Any = {"type": "function", "function": {"name": "paint"}}

BACKEND = small_tokenizers.byte_level()
BACKEND.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
BACKEND.add_special_tokens([AddedToken(text, special=True) for text in ("[THINK]", "[/THINK]")])
EOS: int = BACKEND.token_to_id("<|im_end|>") or 0


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(BACKEND.to_str(), eos_token_ids=[EOS])


def allows(vocabulary: GrammarVocabulary, grammar: str, text: str, backend: Tokenizer = BACKEND) -> bool:
    """Whether the grammar takes all of a text, and then an end."""
    matcher = Grammar(grammar, vocabulary).matcher()
    for token_id in [*backend.encode(text, add_special_tokens=False).ids, EOS]:
        if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.consume([token_id])
    return True


CALL = '{"name": "paint", "arguments": {"colour": "red", "again": true}}'


@pytest.mark.parametrize(
    ("choice", "parallel", "text", "allowed"),
    [
        ("required", True, f"[{CALL}]", True),
        ("required", True, f'[{CALL}, {{"name": "stop", "arguments": {{}}}}]', True),
        ("required", False, f"[{CALL}, {CALL}]", False),
        ("required", True, "[]", False),
        ("required", True, "red", False),
        ("required", True, CALL, False),
        ("required", True, '[{"name": "stop", "arguments": {"colour": "red"}}]', False),
        ("required", True, '[{"name": "sing", "arguments": {}}]', False),
        ("required", True, '[{"name": "paint", "arguments": {"colour": "blue", "again": true}}]', False),
        (NAMED, True, '{"colour": "green", "again": false}', True),
        (NAMED, True, '{"colour": "green"}', False),
        (NAMED, True, "[]", False),
    ],
)
def test_forced_grammar_allows_only_calls(
    vocabulary: GrammarVocabulary, choice: Any, parallel: bool, text: str, allowed: bool
) -> None:
    grammar = tool_call_grammar(tool_use([PAINT, STOP], choice, parallel), Budget())
    assert allows(vocabulary, grammar, text) == allowed


THINK = (Marker("<think>", BACKEND.token_to_id("<think>")), Marker("</think>", BACKEND.token_to_id("</think>")))
SPECIAL = (Marker("[THINK]", BACKEND.token_to_id("[THINK]")), Marker("[/THINK]", BACKEND.token_to_id("[/THINK]")))
SPELT = (Marker("(think)"), Marker("(done)"))


@pytest.mark.parametrize("markers", [THINK, SPECIAL, SPELT], ids=["added", "special", "text"])
@pytest.mark.parametrize(
    ("grammar", "right"),
    [
        (json_schema_grammar(COLOUR, Budget()), '"red"'),
        (from_regex("[0-9]+"), "123"),
        ('start: "yes" | "no"', "yes"),
        (tool_call_grammar(tool_use([PAINT, STOP], "required", True), Budget()), f"[{CALL}]"),
    ],
)
def test_grammar_begins_after_reasoning(
    vocabulary: GrammarVocabulary, markers: tuple[Marker, Marker], grammar: str, right: str
) -> None:
    start, end = markers
    thought = "hm {\n\n" + end.text
    undecided = after_reasoning(grammar, start, end, opened=False)
    assert allows(vocabulary, undecided, right)
    assert allows(vocabulary, undecided, start.text + thought + "\n\n" + right)
    assert not allows(vocabulary, undecided, start.text + thought + "wrong")
    assert not allows(vocabulary, undecided, start.text + "hm")
    opened = after_reasoning(grammar, start, end, opened=True)
    assert allows(vocabulary, opened, thought + right)
    assert not allows(vocabulary, opened, right)


def test_forced_calls_exclude_other_structures() -> None:
    body = {"messages": [], "tools": [PAINT], "tool_choice": "required", "guided_regex": "a"}
    with pytest.raises(RequestError, match="excludes a tool_choice"):
        parse_chat(json.dumps(body).encode())


# ---------------------------------------------------------------- through a router and nodes


@pytest.fixture(scope="module")
def sdk() -> Iterator[openai.OpenAI]:
    """Simulated nodes say nothing that makes sense, except where a grammar leaves no choice."""
    flags = ("--engine", "simulated", "--sim-speed", "1000")
    with Fleet() as fleet:
        fleet.start_prefill(EMBEDDED_MODEL, flags)
        fleet.start_decode(EMBEDDED_MODEL, flags)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready()
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=patience(60)) as sdk:
            yield sdk


ASK: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Paint!"}], "max_tokens": 2000}


def test_required_tool_choice_returns_calls(sdk: openai.OpenAI) -> None:
    fields = {**ASK, "tools": [PAINT, STOP], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    choice = sdk.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert arguments == {} if call.function.name == "stop" else arguments["colour"] in ("red", "green")
    streamed = [
        (part.function.name, part.function.arguments)
        for chunk in sdk.chat.completions.create(**fields, stream=True)
        for part in chunk.choices[0].delta.tool_calls or []
    ]
    assert streamed[0][0] == call.function.name
    assert "".join(arguments for _, arguments in streamed) == call.function.arguments


def test_named_tool_choice_returns_that_call(sdk: openai.OpenAI) -> None:
    choice = sdk.chat.completions.create(**ASK, tools=[PAINT, STOP], tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")


def test_unsupported_schema_is_refused(sdk: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/none"}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**ASK, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"


def test_unsupported_schema_is_refused_with_tool_and_place(sdk: openai.OpenAI) -> None:
    unique = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    tool: Any = {"type": "function", "function": {"name": "label", "parameters": {"properties": {"tags": unique}}}}
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[1\] \(label\): .* at properties\.tags\.uniqueItems"
    ) as caught:
        sdk.chat.completions.create(**ASK, tools=[PAINT, tool], tool_choice="required")
    assert caught.value.param == "tools"
    call = sdk.chat.completions.create(**ASK, tools=[PAINT, tool], tool_choice=NAMED).choices[0]
    assert call.finish_reason == "tool_calls", "only the schema of the named function is held"


def test_items_are_held_to_a_schema(sdk: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "colour", "schema": {"enum": ["red", "green"]}}}
    response = sdk.responses.create(model=MODEL_NAME, input="Which?", text=text, max_output_tokens=2000)
    assert json.loads(response.output_text) in ("red", "green")


# ---------------------------------------------------------------- strict functions under tool_choice "auto"

ADD: Any = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}},
    "strict": True,
}
STRICT = [{"type": "function", "function": ADD}, STOP]
GOOD = '{"name": "add", "arguments": {"a": 1}}'
WRONG = '{"name": "add", "arguments": {"b": 1}}'
FREE = '{"name": "stop", "arguments": {"b": 1}}'  # not strict


def qwen(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{value}</arg_value>\n" for k, value in arguments.items())
    return f"<tool_call>{name}\n{values}</tool_call>"


def minimax(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


def invoke(name: str, **arguments: str) -> str:
    values = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{values}</invoke>\n'


def dsml(*calls: str) -> str:
    return f"<｜DSML｜function_calls>\n{''.join(calls)}</｜DSML｜function_calls>"


def dsml_invoke(name: str, **arguments: str) -> str:
    opening = '<｜DSML｜parameter name="%s" string="true">'
    values = "".join(f"{opening % key}{value}</｜DSML｜parameter>\n" for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'


def deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def v3(name: str, arguments: str) -> str:
    block = f"```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{block}<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


TAGS = [*dict.fromkeys(marker for form in TOOL_PARSERS.values() for marker in form.markers)]


@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize(
    ("family", "allowed", "refused"),
    [
        (
            "hermes",
            ["", "Hi {", f"Hi <tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{FREE}</tool_call> bye"],
            [f"<tool_call>\n{WRONG}\n</tool_call>", "<tool_call>x", '<tool_call>{"name": "sing"'],
        ),
        (
            "llama3_json",
            ["", "Hi {", f"{GOOD}; {FREE}", f"so <|python_tag|>{GOOD}"],
            [WRONG, f" {WRONG}", f"<|python_tag|>{WRONG}", f"so <|python_tag|>{WRONG}"],
        ),
        (
            "mistral",
            ["", "Hi [", f"[TOOL_CALLS][{GOOD}, {FREE}]", 'Hi [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]stop{"b": 1}'],
            [f"[TOOL_CALLS][{WRONG}]", '[TOOL_CALLS]add{"b": 1}', "[TOOL_CALLS]sing{}"],
        ),
        (
            "qwen3_coder",
            ["", "Hi <", f"Hi {qwen('add', a='1')}\n{qwen('stop')} bye", qwen("stop", b="any <text>\n\n"), qwen("add")],
            [qwen("add", b="1"), qwen("add", a="one"), qwen("sing"), "<tool_call>x"],
        ),
        (
            "glm45",
            ["", "Hi <", f"Hi {glm('add', a='1')}\n{glm('stop')} bye", glm("stop", b="any text"), glm("add")],
            [glm("add", b="1"), glm("add", a="one"), glm("sing"), "<tool_call>x"],
        ),
        (
            "minimax_m2",
            ["", "Hi <", f"Hi {minimax(invoke('add', a='1'), invoke('stop', b='any text'))} bye"],
            [minimax(invoke("add", b="1")), minimax(invoke("add", a="one")), minimax(invoke("sing")), minimax()],
        ),
        (
            "deepseek_v32",
            ["", "Hi <", f"Hi {dsml(dsml_invoke('add', a='1'), dsml_invoke('stop', b='any </ text'))} bye"],
            [dsml(dsml_invoke("add", b="1")), dsml(dsml_invoke("add", a="one")), dsml(dsml_invoke("sing")), dsml()],
        ),
        (
            "deepseek_v3",
            ["", "Hi <", "Hi " + deepseek(v3("add", '{"a": 1}'), v3("stop", '{"b": 2}'))],
            [deepseek(v3("add", '{"b": 1}')), deepseek(v3("sing", "{}")), deepseek(v31("add", "{}")), deepseek()],
        ),
        (
            "deepseek_v31",
            ["", "Hi <", "Hi " + deepseek(v31("add", '{"a": 1}'), v31("stop", '{"b": 2}'))],
            [deepseek(v31("add", '{"b": 1}')), deepseek(v31("sing", "{}")), deepseek(v3("add", "{}")), deepseek()],
        ),
    ],
)
def test_strict_functions_are_called_by_their_schema(
    family: str, allowed: list[str], refused: list[str], added: bool
) -> None:
    backend = small_tokenizers.byte_level()
    if added:
        backend.add_tokens([AddedToken(text, special=False) for text in TAGS])
        allowed = [*allowed, '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}'] if family == "mistral" else allowed
    if family == "mistral":  # as in the templates of Mistral 7B v0.3 and Nemo
        allowed = [*allowed, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abc123XYZ"}]']
    vocabulary = GrammarVocabulary(backend.to_str(), eos_token_ids=[EOS])
    form = TOOL_PARSERS[family]
    use = tool_use(STRICT, "auto", True)
    grammar = form.grammar(
        use, lambda text: Marker(text, backend.token_to_id(text) if added else None), Frame(), Budget()
    )

    def in_family(text: str) -> str:
        return text.replace('"arguments"', '"parameters"') if family == "llama3_json" else text

    for text in map(in_family, allowed):
        assert allows(vocabulary, grammar, text, backend), text
        parser = form.parser(typed_values(use.schemas), True)
        calls = [delta.text for delta in parser.push(text) + parser.flush() if delta.kind is DeltaKind.CALL]
        assert len(calls) == len(re.findall("add|stop", text)), "the parser finds what the grammar allows"
    for text in map(in_family, refused):
        assert not allows(vocabulary, grammar, text, backend), text


# ---------------------------------------------------------------- a response format beside tools

ANSWER = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize(
    ("family", "call", "two"),
    [
        (
            "hermes",
            f"<tool_call>\n{GOOD}\n</tool_call>",
            f"\n<tool_call>{FREE}</tool_call>\n<tool_call>{GOOD}</tool_call>",
        ),
        ("llama3_json", GOOD, f"<|python_tag|>{GOOD}; {FREE}"),
        ("llama3_json", GOOD.replace(" ", ""), f"{FREE};{GOOD}"),
        ("mistral", f"[TOOL_CALLS][{GOOD}]", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]stop{}'),
        ("deepseek_v31", deepseek(v31("add", '{"a": 1}')), deepseek(v31("add", "{}"), v31("stop", "{}"))),
        ("qwen3_coder", qwen("add", a="1"), qwen("stop") + qwen("add", a="1")),
        ("glm45", glm("add", a="1"), glm("stop") + glm("add", a="1")),
        ("minimax_m2", minimax(invoke("add", a="1")), minimax(invoke("add"), invoke("stop", b="x"))),
        ("deepseek_v32", dsml(dsml_invoke("add", a="1")), dsml(dsml_invoke("add"), dsml_invoke("stop", b="x"))),
    ],
)
def test_output_is_calls_or_an_answer_by_the_schema(family: str, call: str, two: str, added: bool) -> None:
    backend = small_tokenizers.byte_level()
    if added:
        backend.add_tokens([AddedToken(text, special=False) for text in TAGS])
    vocabulary = GrammarVocabulary(backend.to_str(), eos_token_ids=[EOS])
    key = "parameters" if family == "llama3_json" else "arguments"
    call, two, wrong = (
        text.replace("arguments", key)
        for text in (call, two, call.replace('{"a": 1}', '{"b": 1}').replace("add", "sing"))
    )
    for parallel in (True, False):
        use = tool_use(STRICT, "auto", parallel)
        form = TOOL_PARSERS[family]
        calls = form.grammar(
            use,
            lambda text: Marker(text, backend.token_to_id(text) if added else None),
            Frame(alone=True, or_answer=True),
            Budget(),
        )
        grammar = calls_or_answer(calls, json_schema_grammar(ANSWER, Budget()))
        verdicts = {
            text: allows(vocabulary, grammar, text, backend)
            for text in (call, two, '{"sum": 3}', wrong, '{"sum": "3"}', "Hi", f"Hi {call}", f'{call}{{"sum": 3}}', "")
        }
        assert [text for text, allowed in verdicts.items() if allowed] == [
            call,
            *([two] if parallel else []),
            '{"sum": 3}',
        ]
        opened = after_reasoning(grammar, Marker("(think)"), Marker("(done)"), opened=True)
        assert allows(vocabulary, opened, f"hm(done)\n{call}", backend)
        assert allows(vocabulary, opened, 'hm(done){"sum": 3}', backend)
        assert not allows(vocabulary, opened, "hm(done)Hi", backend)


SCHEMA: dict[str, Any] = {"name": "total", "schema": ANSWER}
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HELLO,
        "tools": STRICT,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    },
    "/v1/responses": {
        "input": HELLO,
        "tools": [{"type": "function", **tool["function"]} for tool in STRICT],
        "text": {"format": {"type": "json_schema", **SCHEMA}},
    },
    "/v1/messages": {
        "messages": HELLO,
        "max_tokens": 100,
        "tools": [{"name": "add", "input_schema": ADD["parameters"]}],
        "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
    },
}


@pytest.mark.parametrize("path", PATHS)
def test_model_may_call_a_tool_or_answer_by_the_format(
    reading_router: RouterProcess, scripted_node: ScriptedNode, say_text: Any, path: str
) -> None:
    def ask(text: str, **fields: Any) -> str:
        body = {**PATHS[path], "model": SCRIPTED, **say_text(text)["extra_body"], **fields}
        response = httpx.post(reading_router.url + path, json=body, timeout=patience(20), trust_env=False)
        assert response.status_code == 200, response.text
        return response.text

    call = f"<tool_call>{GOOD}</tool_call>"
    answer = '{"sum": 3}'
    called = ask(call)
    assert '"add"' in called
    assert "tool_call" in called or "function_call" in called or "tool_use" in called
    held = scripted_node.seen[say_text(call)["extra_body"]["cache_salt"]].message.sampling.grammar
    assert "@answer" in held
    assert '\\"sum\\": 3' in ask(answer)
    none = {"type": "none"} if path == "/v1/messages" else "none"
    ask(answer, tool_choice=none)
    held = scripted_node.seen[say_text(answer)["extra_body"]["cache_salt"]].message.sampling.grammar
    assert "@answer" not in held


LABEL = {"properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}


@pytest.mark.parametrize("path", PATHS)
def test_one_unsupported_schema_leaves_the_others_strict(
    reading_router: RouterProcess, scripted_node: ScriptedNode, say_text: Any, path: str
) -> None:
    name = path.rpartition("/")[2]
    label: Any = {"name": "label", "parameters": LABEL, "strict": True}
    tools = {
        "completions": [{"type": "function", "function": label}],
        "responses": [{"type": "function", **label}],
        "messages": [{"name": "label", "input_schema": LABEL, "strict": True}],
    }[name]
    fields = {
        key: value for key, value in PATHS[path].items() if key not in ("response_format", "text", "output_config")
    }
    extra = say_text(f"<tool_call>{GOOD}</tool_call>")["extra_body"]
    body = {**fields, "model": SCRIPTED, "tools": [*fields["tools"], *tools], **extra}
    for stream in (False, True):
        response = httpx.post(
            reading_router.url + path, json={**body, "stream": stream}, timeout=patience(20), trust_env=False
        )
        assert response.status_code == 200, response.text
        assert '"add"' in response.text
        assert "(label): the schema cannot be held at properties.tags.uniqueItems: " in response.text


# ---------------------------------------------------------------- arguments as texts

TEXTS: Any = {
    "name": "write",
    "strict": True,
    "parameters": {
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["read", "write", 3]},
            "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        },
        "required": ["path"],
        "$defs": {"line": {"type": "integer"}},
    },
}


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"])
def test_arguments_as_texts_follow_the_schema(vocabulary: GrammarVocabulary, family: str) -> None:
    use = tool_use([{"type": "function", "function": TEXTS}], "auto", True)
    form = TOOL_PARSERS[family]
    grammar = form.grammar(use, Marker, Frame(alone=True), Budget())

    def called(**arguments: str) -> str:
        write = {
            "qwen3_coder": qwen,
            "glm45": glm,
            "minimax_m2": lambda *a, **k: minimax(invoke(*a, **k)),
            "deepseek_v32": lambda *a, **k: dsml(dsml_invoke(*a, **k)),
        }[family]
        return write("write", **arguments)

    for right in (
        {"path": "a/b </c> é\n\n"},
        {"path": "", "mode": "read", "note": "abc", "lines": "[1, 2]"},
        {"path": "x", "mode": "3", "note": "null"},
    ):
        assert allows(vocabulary, grammar, called(**right)), right
        parser = form.parser(typed_values(use.schemas), True)
        written = "".join(d.text for d in parser.push(called(**right)) if d.kind is DeltaKind.ARGUMENTS)
        assert json.loads(written)["path"] == right["path"]
    for wrong in (
        {"mode": "read"},
        {"path": "x", "mode": "4"},
        {"path": "x", "note": "abcd"},
        {"path": "x", "lines": "[a]"},
    ):
        assert not allows(vocabulary, grammar, called(**wrong)), wrong


@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize(
    ("family", "end", "behind"),
    [
        ("qwen3_coder", "\n</parameter>", "\n<parameter=path>\nx"),
        ("glm45", "</arg_value>", "\n<arg_key>path</arg_key><arg_value>x"),
        ("minimax_m2", "</parameter>", '<parameter name="path">x'),
    ],
)
def test_strings_may_hold_an_end_tag_that_the_parser_reads_as_text(
    family: str, end: str, behind: str, added: bool
) -> None:
    """Where a tag that may follow does follow, the value ends: then the rest has to follow the schema."""
    backend = small_tokenizers.byte_level()
    form = TOOL_PARSERS[family]
    if added:
        backend.add_tokens([AddedToken(text, special=False) for text in TAGS])
    vocabulary = GrammarVocabulary(backend.to_str(), eos_token_ids=[EOS])
    schema = {"properties": {"path": {"type": "string"}, "mode": {"enum": ["read"]}}, "required": ["path"]}
    write = {"type": "function", "function": {"name": "write", "strict": True, "parameters": schema}}
    use = tool_use([write], "auto", True)
    called = {"qwen3_coder": qwen, "glm45": glm, "minimax_m2": lambda *a, **k: minimax(invoke(*a, **k))}[family]
    for alone in (False, True):
        grammar = form.grammar(
            use,
            lambda text: Marker(text, backend.token_to_id(text) if added else None),
            Frame(alone=alone),
            Budget(),
        )
        for value in (f"a{end}b", f"{end}{end} and </function> {end.strip()}x", f"a\n{end.strip()}b{end}\nb"):
            text = called("write", path=value, mode="read")
            assert allows(vocabulary, grammar, text, backend), text
            parser = form.parser(typed_values(use.schemas, held=True))
            deltas = parser.push(text) + parser.flush()
            arguments = "".join(delta.text for delta in deltas if delta.kind is DeltaKind.ARGUMENTS)
            assert json.loads(arguments) == {"path": value, "mode": "read"}
        assert not allows(vocabulary, grammar, called("write", path=f"a{end}{behind}"), backend)


REASONED: list[tuple[str, str, str]] = [
    ("hermes", f"<tool_call>{GOOD}</tool_call>", f"<tool_call>{WRONG}</tool_call>"),
    ("mistral", f"[TOOL_CALLS][{GOOD}]", f"[TOOL_CALLS][{WRONG}]"),
    ("deepseek_v31", deepseek(v31("add", '{"a": 1}')), deepseek(v31("add", '{"b": 1}'))),
    ("qwen3_coder", qwen("add", a="1"), qwen("add", a="x")),
    ("qwen3_coder", "<function=add>\n</function>\n</tool_call>", "<function=sing>\n</function>"),
    ("glm45", glm("add", a="1"), glm("add", a="x")),
    ("minimax_m2", minimax(invoke("add", a="1")), minimax(invoke("add", a="x"))),
    ("deepseek_v32", dsml(dsml_invoke("add", a="1")), dsml(dsml_invoke("add", a="x"))),
    (
        "llama3_json",
        f"<|python_tag|>{GOOD}".replace("arguments", "parameters"),
        f"<|python_tag|>{WRONG}".replace("arguments", "parameters"),
    ),
]


@pytest.mark.parametrize("alone", [False, True], ids=["in text", "or an answer"])
@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize(("family", "right", "wrong"), REASONED)
def test_calls_in_the_reasoning_follow_their_schema(
    family: str, right: str, wrong: str, added: bool, alone: bool
) -> None:
    backend = small_tokenizers.byte_level()
    form = TOOL_PARSERS[family]
    if added:
        backend.add_tokens([AddedToken(text, special=False) for text in (*TAGS, "<think>", "</think>")])
    vocabulary = GrammarVocabulary(backend.to_str(), eos_token_ids=[EOS])

    def marker(text: str) -> Marker:
        return Marker(text, backend.token_to_id(text) if added else None)

    frame = Frame(alone, alone, Reasoning(marker("<think>"), marker("</think>"), opened=True))
    grammar = form.grammar(tool_use(STRICT, "auto", True), marker, frame, Budget())
    if alone:
        grammar = calls_or_answer(grammar, json_schema_grammar(ANSWER, Budget()))
    assert allows(vocabulary, grammar, f"Hm.\n{right}", backend)
    assert allows(vocabulary, grammar, 'Hm.</think>{"sum": 3}' if alone else "Hm.</think>\n\nHi", backend)
    assert not allows(vocabulary, grammar, f"Hm.\n{wrong}", backend)
    if "<function" not in right[:9]:
        assert allows(vocabulary, grammar, f"Hm.</think>\n{right}", backend)
        assert not allows(vocabulary, grammar, f"Hm.</think>\n{wrong}", backend)


def test_schema_that_a_format_cannot_hold_is_refused_by_name() -> None:
    pattern = {**TEXTS, "parameters": {"properties": {"a": {"type": "string", "pattern": "^a"}}}}
    combined = {**TEXTS, "parameters": {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}}
    for function, keyword in ((pattern, "pattern"), (combined, "anyOf")):
        use = tool_use([{"type": "function", "function": function}], "auto", True)
        with pytest.raises(RequestError, match=f"'{keyword}' of .* cannot be held in this model's format"):
            TOOL_PARSERS["glm45"].grammar(use, Marker, Frame(alone=True), Budget())
