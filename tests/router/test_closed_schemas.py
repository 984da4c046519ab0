"""Properties that a schema does not declare: whether outputs may have them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import small_tokenizers

from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary
from router.text.chat.tool_grammar import tool_call_grammar
from router.text.chat.tools import tool_use
from router.text.structured.closed_schemas import closed
from router.text.structured.structured_outputs import json_schema_grammar, structural_tag_grammar
from router.text.structured.work_budget import Budget

BACKEND = small_tokenizers.byte_level()
EOS: int = BACKEND.token_to_id("<|im_end|>") or 0
N = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": N}}
B: dict[str, Any] = {"type": "object", "properties": {"b": N}}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(BACKEND.to_str(), eos_token_ids=[EOS])


def allows(vocabulary: GrammarVocabulary, grammar: str, value: Any) -> bool:
    matcher = Grammar(grammar, vocabulary).matcher()
    text = value if isinstance(value, str) else json.dumps(value)
    for token_id in [*BACKEND.encode(text, add_special_tokens=False).ids, EOS]:
        if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.consume([token_id])
    return True


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (A, [{}, {"a": 1}], [{"a": 1, "z": 1}, {"z": 1}]),
        ({"properties": {"a": N}}, [{"a": 1}], [{"z": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
        ({**A, "additionalProperties": True}, [{"a": 1, "z": "x"}], [{"a": "x"}]),
        ({**A, "additionalProperties": N}, [{"a": 1, "z": 2}], [{"z": "x"}]),
        ({"type": "object"}, [{"z": 1}], []),
        ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}]),
        ({**A, "required": ["a", "z"]}, [{"a": 1, "z": "x"}], [{"a": 1}, {"a": 1, "z": 1, "y": 1}]),
        ({"type": "object", "patternProperties": {"^x": N}}, [{"x1": 1}], [{"z": 1}]),
        # parts
        ({"type": "object", "properties": {"p": A}}, [{"p": {"a": 1}}], [{"p": {"z": 1}}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"z": 1}]]),
        ({"type": "array", "prefixItems": [A], "items": B}, [[{"a": 1}, {"b": 1}]], [[{"b": 1}], [{}, {"z": 1}]]),
        ({"type": "object", "patternProperties": {"^x": A}}, [{"x": {"a": 1}}], [{"x": {"z": 1}}]),
        ({"type": "object", "additionalProperties": A}, [{"k": {"a": 1}}], [{"k": {"z": 1}}]),
        ({"enum": [{"z": 1}]}, [{"z": 1}], [{}]),
        ({"type": "object", "properties": {"p": {"const": {"properties": {}}}}}, [{"p": {"properties": {}}}], []),
        # references
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
            [{"n": {"n": {}}}],
            [{"n": {"z": 1}}, {"z": 1}],
        ),
        (
            {"properties": {"p": {"$ref": "#/definitions/a~1"}}, "definitions": {"a/": A}},
            [{"p": {}}],
            [{"p": {"z": 1}}],
        ),
        ({"properties": {"a": N, "p": {"$ref": "#"}}}, [{"p": {"a": 1}}], [{"p": {"z": 1}}]),
        # combinations
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"z": 1}, {"a": 1, "b": 1}]),
        ({"anyOf": [A, {"type": "null"}]}, [{"a": 1}, None], [{"z": 1}]),
        ({**A, "anyOf": [B, {"properties": {"c": N}}]}, [{"a": 1, "b": 1}, {"a": 1, "c": 1}], [{"a": 1, "z": 1}]),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "z": 1}, {}]),
        ({"type": "object", "allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "z": 1}, {"b": "x"}]),
        ({"type": "object", "allOf": [{**A, "additionalProperties": True}, B]}, [{"a": 1, "z": 1}], [{"b": "x"}]),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "properties": {"b": N, "p": {"$ref": "#/$defs/a"}}, "$defs": {"a": A}},
            [{"a": 1, "b": 1, "p": {"a": 1}}],
            [{"z": 1}, {"a": "x"}, {"p": {"z": 1}}],
        ),
        ({"allOf": [{"$ref": "#/$defs/a"}], "title": "t", "$defs": {"a": A}}, [{"a": 1}], [{"z": 1}]),
        ({"$ref": "#/$defs/a", "properties": {"b": N}, "$defs": {"a": A}}, [{"a": 1, "b": 1}], [{"z": 1}]),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}], "properties": {"b": N}, "$defs": {"a": A}},
            [{"a": 1, "b": 1}],
            [{"z": 1}, {"a": "x"}],
        ),
        ({"type": ["object", "null"], "properties": {"a": N}}, [None, {"a": 1}], [{"z": 1}]),
    ],
)
def test_objects_have_only_declared_properties(
    vocabulary: GrammarVocabulary, schema: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    before = json.dumps(schema)
    grammar = json_schema_grammar(schema, Budget())
    for value in allowed:
        assert allows(vocabulary, grammar, value), value
    for value in refused:
        assert not allows(vocabulary, grammar, value), value
    assert json.dumps(schema) == before


def test_tools_and_structural_tags_have_only_declared_properties(vocabulary: GrammarVocabulary) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": A}}
    grammar = tool_call_grammar(tool_use([tool], {"type": "function", "function": {"name": "f"}}, True), Budget())
    assert allows(vocabulary, grammar, {"a": 1})
    assert not allows(vocabulary, grammar, {"z": 1})
    tag = {"structures": [{"begin": "<f>", "schema": A, "end": "</f>"}], "triggers": ["<f"]}
    grammar = structural_tag_grammar(tag, Budget())
    assert allows(vocabulary, grammar, 'x<f>{"a": 1}</f>')
    assert not allows(vocabulary, grammar, 'x<f>{"z": 1}</f>')


def test_schema_that_combines_too_much_is_refused() -> None:
    wide: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(1000)}}
    many = {"$defs": {"w": wide}, "anyOf": [{"allOf": [{"$ref": "#/$defs/w"}, A]} for _ in range(1000)]}
    chain: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"properties": {"p": deep}}
    for schema, said in ((many, "simplify"), ({"$ref": "#/$defs/d0", "$defs": chain}, "simplify"), (deep, "flatten")):
        with pytest.raises(RequestError, match=said):
            closed(schema, Budget())


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        ({"^a$": N}, [{"a": 1}], [{"a": "x"}, {"c": 1}]),
        ({"^(a|b)$": {}, "^(?:no){0}b$": {}}, [{"a": "x", "b": 1}], [{"c": 1}]),
        ({"^[ab]$": N}, [{"a": 1, "b": 2}], [{"b": "x"}]),
        ({"^[ab]$": N, "^b{0}c$": N}, [{"a": 1, "c": 2}], [{"c": "x"}, {"d": 1}]),  # c is new
        ({"b": N}, [{"a": "x", "abba": 1}], [{"abba": "x"}, {"c": 1}]),  # not anchored
        ({r"^\d$": N}, [{"a": "x", "7": 1}], [{"x": 1}]),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("ends", [{}, {"additionalProperties": False}], ids=["open", "closed"])
def test_no_answer_ends_at_a_comma_because_patterns_match_only_declared_names(
    vocabulary: GrammarVocabulary,
    ends: dict[str, Any],
    patterns: dict[str, Any],
    allowed: list[Any],
    refused: list[Any],
) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "patternProperties": patterns} | ends
    grammar = json_schema_grammar(schema, Budget())
    assert [allows(vocabulary, grammar, value) for value in allowed] == [True] * len(allowed)
    assert [allows(vocabulary, grammar, value) for value in refused] == [False] * len(refused)
    matcher = Grammar(grammar, vocabulary).matcher()
    matcher.consume(BACKEND.encode('{"a": 1, "b": 2', add_special_tokens=False).ids)
    (comma,) = BACKEND.encode(",", add_special_tokens=False).ids
    if matcher.mask()[comma // 8] >> comma % 8 & 1:
        matcher.consume(BACKEND.encode(', "', add_special_tokens=False).ids)
        assert any(matcher.mask())


def test_pattern_that_matches_no_name_leaves_an_empty_object(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "object", "patternProperties": {"^$": N}, "properties": {"": N}, "additionalProperties": False}
    assert allows(vocabulary, json_schema_grammar(schema, Budget()), "{}")
    assert allows(vocabulary, json_schema_grammar(schema, Budget()), {"": 1})
