"""Request bodies that are legal and hostile: short texts that stand for much work. Each takes its size in bytes, about.

SCHEMAS are JSON schemas of objects. BODIES has for each endpoint whose bodies a client makes the bodies by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]


def _look_ahead_alternatives(size: int) -> Schema:
    return {"properties": {"a": {"type": "string", "pattern": "^(?!x)" + "(?:aa|bb)" * min(size // 9, 100) + "$"}}}


def _look_aheads(size: int) -> Schema:
    patterns = [f"^(?!x{i})" + "(?:a?b|b?a)" * min(size // 200, 90) + "$" for i in range(16)]
    return {"properties": {f"p{i}": {"type": "string", "pattern": pattern} for i, pattern in enumerate(patterns)}}


def _nested_look_ahead(size: int) -> Schema:
    depth = min(size // 30, 90)
    return {"properties": {"a": {"type": "string", "pattern": "^(?!" + "(a|b|" * depth + "c" + ")*" * depth + "d)"}}}


def _tags(size: int) -> Schema:
    """Branches share properties of which each lists many values, and only the last property is a tag."""
    values = {"enum": [f"value{i}" for i in range(size // 30)]}
    count = max(2, size // 800)
    shared = {f"p{i}": {"$ref": "#/$defs/v"} for i in range(20)}
    branches = [{"properties": {**shared, "tag": {"const": i}}} for i in range(count)]
    return {"oneOf": branches, "$defs": {"v": values}}


def _branching_tags(size: int) -> Schema:
    """Each definition is a union of the next one twice."""
    defs: Schema = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(15)}
    defs["d15"] = {"properties": {"tag": {"enum": [f"value{i}" for i in range(size // 20)]}}}
    return {"oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}], "$defs": defs}


def _branching_values(size: int) -> Schema:
    """Like ``_branching_tags``, for the value of one property."""
    defs: Schema = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(14)}
    defs["d14"] = {"enum": [f"value{i}" for i in range(size // 20)]}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}


def _repeated_values(size: int) -> Schema:
    """A property is one long enum, many times over."""
    values = {"enum": [f"value{i}" for i in range(size // 26)]}
    return {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/v"}] * (size // 40)}}, "$defs": {"v": values}}


def _properties_with_definitions(size: int) -> Schema:
    """Each property of a kind that needs a document of its own, with all definitions."""
    items = {"type": "array", "items": {"$ref": "#/$defs/v"}}
    definition = {"type": "string", "enum": ["x" * (size // 2)]}
    return {"properties": {f"p{i}": items for i in range(size // 110)}, "$defs": {"v": definition}}


def _arrangements(size: int) -> Schema:
    """Arrays of unique values, each of which stands for 128 arrays of long values."""
    values = {"enum": [f"{i}" * (size // 16) for i in range(7)]}
    unique = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/v"}}
    return {"properties": {f"p{i}": unique for i in range(size // 150)}, "$defs": {"v": values}}


def _property_names(size: int) -> Schema:
    """A long schema for each of many names."""
    names = {"enum": [f"name{i}" for i in range(size // 30)]}
    schema = {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": {"enum": ["x" * (size // 3)]}}
    return {"properties": {"a": schema, "b": {**schema}}, "$defs": {"n": names}}


def _patterns_of_names(size: int) -> Schema:
    """Patterns that match names of all lengths in many ways."""
    longest = int((size / 2) ** 0.5)
    names: Schema = {"a" * i: {} for i in range(1, longest)}
    patterns = {f"^(a{{0,{longest // 2}}}){{2}}{'(?:)' * (i % 50)}$": {"minLength": i} for i in range(size // 120)}
    return {"properties": names, "patternProperties": patterns, "additionalProperties": False}


def _long_schema_for_names(size: int) -> Schema:
    """A pattern applies a long schema to many names."""
    names: Schema = {f"n{i}": {} for i in range(size // 30)}
    pattern = "^(" + "|".join(names) + ")$"
    patterns = {pattern: {"enum": ["x" * (size // 3)]}}
    return {"properties": names, "patternProperties": patterns, "additionalProperties": False}


def _names_in_branches(size: int) -> Schema:
    """Many names beside many branches."""
    names: Schema = {f"p{i}": {} for i in range(size // 20)}
    return {"properties": names, "additionalProperties": True, "anyOf": [{}] * (size // 8)}


def _patterns_in_branches(size: int) -> Schema:
    patterns: Schema = {f"p{i}": {} for i in range(size // 20)}
    return {"patternProperties": patterns, "anyOf": [{"properties": {"b": {}}}] * (size // 60)}


def _doubling(size: int) -> Schema:
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    return {"allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**chain, "d60": {"properties": {"x" * (size // 2): {}}}}}


def _long_references(size: int) -> Schema:
    """A reference that is as long as it is wrong, read many times."""
    wrong = {"$ref": "#/$defs/a" + "/a" * (size // 4)}
    return {"anyOf": [{"$ref": "#/$defs/a"}] * (size // 60), "$defs": {"a": wrong}}


def _chained_references(size: int) -> Schema:
    count = size // 60
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "properties": {"a": {}}} for i in range(min(count, 150))}
    return {"anyOf": [{"$ref": "#/$defs/d0"}] * count, "$defs": defs}


def _formats(size: int) -> Schema:
    return {"properties": {f"p{i}": {"type": "string", "format": f"f{i}"} for i in range(size // 40)}}


def _required(size: int) -> Schema:
    names = [f"p{i}" for i in range(size // 30)]
    return {"properties": {name: {} for name in names}, "required": names}


def _deep(size: int) -> Schema:
    schema: Schema = {"type": "string"}
    for i in range(min(size // 100, 30)):
        schema = {"properties": {f"p{i}": schema}, "anyOf": [{}, {"required": [f"p{i}"]}]}
    return schema


def _wide(size: int) -> Schema:
    """An ordinary schema, but for its length."""
    return {"properties": {f"p{i}": {"type": "string", "minLength": 1} for i in range(size // 45)}}


def _own_reference(size: int) -> Schema:
    return {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"allOf": [{"$ref": "#/properties/b"}] * 2}}}


SCHEMAS: dict[str, Callable[[int], Schema]] = {
    "look-ahead before alternatives": _look_ahead_alternatives,
    "look-aheads": _look_aheads,
    "nested look-ahead": _nested_look_ahead,
    "tags": _tags,
    "branching tags": _branching_tags,
    "branching values": _branching_values,
    "repeated values": _repeated_values,
    "properties with definitions": _properties_with_definitions,
    "arrangements": _arrangements,
    "property names": _property_names,
    "patterns of names": _patterns_of_names,
    "a long schema for names": _long_schema_for_names,
    "names in branches": _names_in_branches,
    "patterns in branches": _patterns_in_branches,
    "doubling": _doubling,
    "long references": _long_references,
    "chained references": _chained_references,
    "formats": _formats,
    "required": _required,
    "deep": _deep,
    "wide": _wide,
    "own reference": _own_reference,
}

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "a"}
Fields = dict[str, Any]


def function(schema: Schema, name: str = "f", strict: bool = True) -> Fields:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


def object_schema(schema: Schema) -> Schema:
    return {"type": "object", **schema}


def tools(schema: Schema) -> list[Fields]:
    return [function(object_schema(schema))]


def _texts(size: int, length: int) -> list[str]:
    return [f"{i:x}".ljust(length, "z") for i in range(size // (length + 3))]


def _token_ids(number: int) -> list[int]:
    return [i % 500 for i in range(number)]


def _stops(size: int) -> list[str]:
    return ["a" * (size // 64 - i % 7) + str(i) for i in range(64)]


def _calls(size: int) -> list[Fields]:
    """A conversation of calls and results."""
    messages: list[Fields] = [USER]
    for i in range(size // 230):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": 2}]}'}}
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": "b"})
    return messages


def _items(size: int) -> list[Fields]:
    items: list[Fields] = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    for i in range(size // 200):
        items.append({"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{i}", "output": "b"})
    return items


def _blocks(size: int) -> list[Fields]:
    """Messages of calls and results, with images and instructions between."""
    messages: list[Fields] = [USER]
    for i in range(size // 300):
        call = {"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}}
        messages.append({"role": "assistant", "content": [call]})
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": [{"type": "text", "text": "b"}]}
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        messages += [{"role": "user", "content": [result, image]}, {"role": "system", "content": "c"}]
    return [*messages, USER]


def _many_tools(size: int) -> list[Fields]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return [function(schema, f"f{i}") for i in range(min(1024, size // 140))]


def _allowed_tools(size: int) -> Fields:
    """A choice that lists one of many tools many times."""
    listed = [{"type": "function", "function": {"name": "f0"}}] * (size // 60)
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    return {"tools": _many_tools(size), "tool_choice": choice}


def _structural_tag(size: int) -> Fields:
    schema = object_schema(_tags(size // 64))
    structures = [{"begin": f"<f{i}>", "schema": schema, "end": "</f>"} for i in range(64)]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}


def _lark(size: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: r{i + 1} "x" | "y"\n' for i in range(size // 20)) + f'r{size // 20}: "a"\n'


def _kwargs(size: int) -> Fields:
    return {"a": [[i] for i in range(size // 12)]}


# Fields with the structure of an output, by name: for completions, and for chats.
STRUCTURES: dict[str, Callable[[int], Fields]] = {
    "choices": lambda size: {"guided_choice": _texts(size, 6)},
    "a regex": lambda size: {"guided_regex": "(a|b)*" * (size // 6)},
    "a pattern of look-aheads": lambda size: {"guided_regex": "(?!a)" * (size // 5)},
    "rules": lambda size: {"guided_grammar": _lark(size)},
    "EBNF": lambda size: {"ebnf": _lark(size).replace("start:", "root ::=").replace(": ", " ::= ")},
    "structural tags": lambda size: {"response_format": _structural_tag(size)},
    "a schema in a text": lambda size: {"guided_json": json.dumps(_tags(size))},
}
PROMPTS: dict[str, Callable[[int], Fields]] = {
    "token ids": lambda size: {"prompt": _token_ids(size // 5), "max_tokens": 1},
    "prompts": lambda size: {"prompt": [[i % 500] for i in range(min(2048, size // 8))]},
    "texts": lambda size: {"prompt": _texts(size, 20)[:500]},
    "a text": lambda size: {"prompt": "ab " * (size // 3)},
    "stops": lambda size: {"prompt": "a", "stop": _stops(size)},
    "bad words": lambda size: {"prompt": "a", "bad_words": _texts(size, max(4, size // 1024))[:1024]},
    "biases": lambda size: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(min(500, size // 10))}},
    "allowed tokens": lambda size: {"prompt": "a", "allowed_token_ids": _token_ids(min(16_384, size // 5))},
    "lists": lambda size: {"prompt": "a", "metadata": [[]] * (size // 4)},
}
CHATS: dict[str, Callable[[int], Fields]] = {
    "messages": lambda size: {"messages": [USER] * min(10_000, size // 35)},
    "parts": lambda size: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (size // 32)}]},
    "calls": lambda size: {"messages": _calls(size)},
    "arguments": lambda size: {"messages": [USER, _with_arguments(size)]},
    "many tools": lambda size: {"messages": [USER], "tools": _many_tools(size)},
    "many tools, forced": lambda size: {"messages": [USER], "tools": _many_tools(size), "tool_choice": "required"},
    "allowed tools": lambda size: {"messages": [USER], **_allowed_tools(size // 2)},
    "template variables": lambda size: {"messages": [USER], "chat_template_kwargs": _kwargs(size)},
    "documents": lambda size: {"messages": [USER], "documents": [{"text": "a"}] * min(2048, size // 14)},
    "a template": lambda size: {"messages": [USER], "chat_template": "{% if a %}{% endif %}" * (size // 24)},
}


def _with_arguments(size: int) -> Fields:
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [[]] * (size // 5)})}}
    return {"role": "assistant", "tool_calls": [call]}


def _completions(size: int) -> Iterator[tuple[str, Fields]]:
    for name, make in PROMPTS.items():
        yield name, make(size)
    for name, make in STRUCTURES.items():
        yield name, {"prompt": "a", **make(size)}
    for name, schema in SCHEMAS.items():
        yield f"schema: {name}", {"prompt": "a", "guided_json": schema(size)}


def _chats(size: int) -> Iterator[tuple[str, Fields]]:
    for name, make in CHATS.items():
        yield name, make(size)
    for name, make in STRUCTURES.items():
        yield name, {"messages": [USER], **make(size)}
    for name, make_schema in SCHEMAS.items():
        schema = make_schema(size)
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        yield f"schema: {name}", {"messages": [USER], "response_format": form}
        yield f"strict tool: {name}", {"messages": [USER], "tools": tools(schema)}
        yield f"forced tool: {name}", {"messages": [USER], "tools": tools(schema), "tool_choice": "required"}
        yield f"tool and format: {name}", {"messages": [USER], "tools": tools(schema), "response_format": form}


def _responses(size: int) -> Iterator[tuple[str, Fields]]:
    yield "items", {"input": _items(size)}
    yield "empty items", {"input": [USER, *[{"type": "reasoning", "summary": []}] * (size // 40)]}
    yield "references", {"input": [USER, *[{"type": "item_reference", "id": "msg_a"}] * (size // 50)]}
    yield "provider's items", {"input": [USER, *[{"type": "web_search_call", "action": {"a": {}}}] * (size // 55)]}
    inner = [{"type": "function", **tool["function"]} for tool in _many_tools(size)]
    yield "namespaces", {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": inner}]}
    for name, make_schema in SCHEMAS.items():
        schema = make_schema(size)
        form = {"type": "json_schema", "name": "n", "schema": schema}
        yield f"schema: {name}", {"input": "a", "text": {"format": form}}
        tool = {"type": "function", "name": "f", "strict": True, "parameters": object_schema(schema)}
        yield f"strict tool: {name}", {"input": "a", "tools": [tool]}


def _messages(size: int) -> Iterator[tuple[str, Fields]]:
    base = {"model": "small", "max_tokens": 1, "messages": [USER]}
    yield "blocks", {**base, "messages": _blocks(size)}
    yield "texts", {**base, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (size // 32)}]}
    yield "stops", {**base, "stop_sequences": _stops(size)}
    for name, make_schema in SCHEMAS.items():
        schema = make_schema(size)
        yield f"schema: {name}", {**base, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        tool = {"name": "f", "strict": True, "input_schema": object_schema(schema)}
        yield f"tool: {name}", {**base, "tools": [tool]}


def _compact(size: int) -> Iterator[tuple[str, Fields]]:
    yield "items", {"model": "small", "input": _items(size)}


def _tokenize(size: int) -> Iterator[tuple[str, Fields]]:
    yield "a text", {"prompt": "ab" * (size // 2), "return_token_strs": True}
    yield "messages", CHATS["messages"](size)
    yield "tools", {"messages": [USER], "tools": _many_tools(size)}


def _detokenize(size: int) -> Iterator[tuple[str, Fields]]:
    yield "token ids", {"tokens": _token_ids(size // 5)}


def _count_tokens(size: int) -> Iterator[tuple[str, Fields]]:
    yield "blocks", {"messages": _blocks(size)}
    yield "tools", {"messages": [USER], "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(size // 40)]}


def _embeddings(size: int) -> Iterator[tuple[str, Fields]]:
    yield "texts", {"input": _texts(size, max(4, size // 2048))[:2048]}
    yield "token ids", {"input": [_token_ids(20)] * min(2048, size // 100)}
    yield "a text", {"input": "ab " * (size // 3)}


def _scores(size: int) -> Iterator[tuple[str, Fields]]:
    documents = _texts(size, max(30, size // 2048))[:2048]
    yield "documents", {"queries": "a", "documents": documents}
    yield "cut documents", {"queries": "a", "documents": documents, "max_tokens_per_doc": 3}
    yield "pairs", {"queries": documents[::2], "documents": documents[::2]}


def _rankings(size: int) -> Iterator[tuple[str, Fields]]:
    yield "documents", {"query": "a", "documents": [{"text": text} for text in _texts(size, 60)[:2048]]}
    yield "cut documents", {"query": "a", "documents": _texts(size, 60)[:2048], "max_tokens_per_doc": 2}


BODIES: dict[str, Callable[[int], Iterator[tuple[str, Fields]]]] = {
    COMPLETIONS: _completions,
    "/v1/completions/render": _completions,
    CHAT: _chats,
    "/v1/chat/completions/render": _chats,
    RESPONSES: _responses,
    "/v1/responses/compact": _compact,
    MESSAGES: _messages,
    "/v1/messages/count_tokens": _count_tokens,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
    "/v1/embeddings": _embeddings,
    "/v1/score": _scores,
    "/v1/rerank": _rankings,
}
