"""JSON schemas as generators write them: each is held, or refused for a constraint that is named with its place."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union
from uuid import UUID

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pydantic
import pytest
import regex  # type: ignore[import-untyped]
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from pdserve.errors import RequestError
from pdserve.grammar import Grammar, GrammarVocabulary
from router.text.structured.schema_problems import located_problem
from router.text.structured.structured_outputs import json_schema_grammar
from router.text.structured.work_budget import Budget

BACKEND = small_tokenizers.byte_level()
EOS: int = BACKEND.token_to_id("<|im_end|>") or 0
TEXTS = [BACKEND.decode([token_id]) for token_id in range(BACKEND.get_vocab_size())]
CLOSERS = {EOS} | {token_id for token_id, text in enumerate(TEXTS) if text in ('"', "]", "}", '"}', '"]')}
USUAL = ("abyz", "ABZT", "0123", "@.:/-")  # characters that the patterns below ask for
PLAIN = {token_id for token_id, text in enumerate(TEXTS) if text.isascii() and text.isprintable()}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(BACKEND.to_str(), eos_token_ids=[EOS])


# ---------------------------------------------------------------- pydantic


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Options(TypedDict, total=False):
    depth: int
    name: str


@dataclasses.dataclass
class Span:
    first: int
    last: Optional[int] = None  # noqa: UP045 - as clients write it


class Address(BaseModel):
    """A postal address."""

    street: str = Field(min_length=1, description="with the number", examples=["Main St 1"])
    code: str = Field(pattern=r"^[0-9]{5}$", deprecated=True)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Fish(BaseModel):
    kind: Literal["fish"]
    size: Literal["small", "large"] = "small"


class Whale(BaseModel):
    kind: Literal["whale"]
    size: Literal["huge"] = "huge"


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Swimmer = Annotated[Fish | Whale, Field(discriminator="size")]
Animal = Annotated[Union[Cat, Dog, Swimmer], Field(discriminator="kind")]  # noqa: UP007 - Swimmer has a discriminator

FIELDS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "any": Any,
    "object": object,
    "bytes": bytes,
    "decimal": Decimal,
    "bounded decimal": Annotated[Decimal, Field(ge=0, max_digits=6, decimal_places=2)],
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "uuid": UUID,
    "path": Path,
    "url": pydantic.AnyUrl,
    "file url": pydantic.FileUrl,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "secret": pydantic.SecretStr,
    "json": pydantic.Json[list[int]],
    "regex": re.Pattern[str],
    "base64": pydantic.Base64Str,
    "bounded text": Annotated[str, Field(min_length=2, max_length=5)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}-\d+$")],
    "positive": pydantic.PositiveInt,
    "bounded int": Annotated[int, Field(ge=-3, lt=40)],
    "bounded float": Annotated[float, Field(gt=0.5, le=2)],
    "multiple": Annotated[int, Field(multiple_of=5)],
    "past": pydantic.PastDate,
    "colour": Colour,
    "level": Level,
    "literal": Literal["a", 1, None, True],
    "list": list[int],
    "bounded list": Annotated[list[str], Field(min_length=1, max_length=2)],
    "nested list": list[list[Address]],
    "tuple": tuple[int, str],
    "any tuple": tuple[int, ...],
    "named tuple": Point,
    "dict": dict[str, int],
    "int keys": dict[int, str],
    "colour keys": dict[Colour, int],
    "literal keys": dict[Literal["a", "b"], Address],
    "pattern keys": dict[Annotated[str, Field(pattern="^x")], int],
    "short keys": dict[Annotated[str, Field(max_length=3)], int],
    "uuid keys": dict[UUID, int],
    "bounded dict": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "colour set": set[Colour],
    "literal set": frozenset[Literal["a", "b", "c", "d", "e"]],
    "bool set": set[bool],
    "one of a set": Annotated[set[str], Field(max_length=1)],
    "typed dict": Options,
    "data class": Span,
    "model": Address,
    "strict model": Strict,
    "open model": Open,
    "recursive": Node,
    "union": int | str,
    "model union": Address | Strict,
    "pet": Pet,
    "animal": Animal,
    "pets": list[Pet],
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "field": lambda kind: kind,
    "optional": lambda kind: Optional[kind],  # noqa: UP045
    "list": list.__class_getitem__,
}


def model(**fields: Any) -> dict[str, Any]:
    schema: dict[str, Any] = pydantic.create_model("Model", **fields).model_json_schema()
    return schema


def pydantic_schemas(wrapped_by: Iterable[str], models: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, kind in FIELDS.items():
        yield name, TypeAdapter(kind).json_schema()
        for wrapper in wrapped_by:
            yield f"{wrapper} {name}", model(value=WRAPPERS[wrapper](kind))
    rng = random.Random(7)
    for number in range(models):
        kinds = rng.sample(sorted(FIELDS), 4)
        fields = {f"f{at}": FIELDS[kind] for at, kind in enumerate(kinds)}
        fields |= {f"d{at}": (WRAPPERS["optional"](FIELDS[kind]), None) for at, kind in enumerate(kinds[:2])}
        yield f"model {number} of {', '.join(kinds)}", model(**fields)


ZOD: list[dict[str, Any]] = json.loads((Path(__file__).parent / "zod_schemas.json").read_text(encoding="utf-8"))
# Real constraints that grammars cannot hold: keywords by the end of a schema's name.
REFUSED = {
    ": behind": "pattern",  # look-behind
    ": word": "pattern",  # \\b
    "zod 4, draft-2020-12: emoji": "pattern",  # look-ahead with classes of characters
    ": set": "uniqueItems",
}


# ---------------------------------------------------------------- outputs of a grammar


def sample(grammar: Grammar, rng: random.Random) -> str:
    """Return a random output; after some tokens, one that ends soon."""
    matcher = grammar.matcher()
    text = ""
    patience = rng.randint(0, 16)
    for count in itertools.count():
        assert count < 600, f"the output does not end: {text}"
        mask = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
        allowed = mask.nonzero()[0].tolist()
        closing = [token_id for token_id in allowed if token_id in CLOSERS]
        if closing and rng.random() < (0.6 if count > patience else 0.3):
            allowed = closing
        elif count > patience:
            usual = rng.choice(USUAL)
            allowed = [token_id for token_id in allowed if TEXTS[token_id] in usual] or allowed
        token_id = rng.choice([plain for plain in allowed if plain in PLAIN] or allowed)
        if token_id == EOS:
            return text
        matcher.consume([token_id])
        text += TEXTS[token_id]
    raise AssertionError


def _matches(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def without_nullable(schema: Any) -> Any:
    """Return a schema of OpenAPI 3.0 as one that jsonschema knows."""
    if isinstance(schema, list):
        return [without_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {name: without_nullable(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if schema.get("nullable") is True else rest


def finite(text: str) -> float:
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def check(name: str, schema: dict[str, Any], text: str) -> None:
    is_openapi = "openapi" in name.lower() or ", openAi:" in name  # the latter has the form, and another $schema
    default: Any = jsonschema.Draft4Validator if is_openapi else jsonschema.Draft202012Validator
    kind = default if is_openapi else jsonschema.validators.validator_for(schema, default)
    validator = jsonschema.validators.extend(kind, {"pattern": _matches})
    validator(without_nullable(schema) if is_openapi else schema).validate(json.loads(text, parse_float=finite))


def hold_or_refuse(vocabulary: GrammarVocabulary, name: str, schema: dict[str, Any], outputs: int) -> None:
    refused = next((keyword for end, keyword in REFUSED.items() if name.endswith(end)), "")
    text = json_schema_grammar(schema, Budget())
    problem = located_problem(text)
    assert bool(problem) == bool(refused), f"{name}: {problem}"
    assert f"{refused}: " in problem or not refused
    if refused:
        return
    grammar = Grammar(text, vocabulary)
    rng = random.Random(name)
    for _ in range(outputs):
        text = sample(grammar, rng)
        try:
            check(name, schema, text)
        except (ValueError, jsonschema.ValidationError) as exc:
            raise AssertionError(f"{name}: {schema} allows {text}") from exc


def test_schemas_of_pydantic_are_held(vocabulary: GrammarVocabulary) -> None:
    for name, schema in pydantic_schemas(["field"], models=10):
        hold_or_refuse(vocabulary, name, schema, outputs=1)


def test_schemas_of_zod_are_held_or_refused(vocabulary: GrammarVocabulary) -> None:
    for entry in ZOD:
        hold_or_refuse(vocabulary, entry["name"], entry["schema"], outputs=1)


@pytest.mark.slow
def test_many_outputs_follow_generated_schemas(vocabulary: GrammarVocabulary) -> None:
    every = [*pydantic_schemas(WRAPPERS, models=200), *((entry["name"], entry["schema"]) for entry in ZOD)]
    for name, schema in every:
        hold_or_refuse(vocabulary, name, schema, outputs=8)


# ---------------------------------------------------------------- what is allowed


def allows(vocabulary: GrammarVocabulary, schema: dict[str, Any], value: Any) -> bool:
    matcher = Grammar(json_schema_grammar(schema, Budget()), vocabulary).matcher()
    for token_id in [*BACKEND.encode(json.dumps(value), add_special_tokens=False).ids, EOS]:
        if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.consume([token_id])
    return True


COLOURS = {"enum": ["red", "green"]}
TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, "size": {"type": "integer"}}}
    for kind in ("a", "b")
]


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string", "format": "color", "title": None, "required": None}, ["x"], [1]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["today"]),
        ({"type": "integer", "nullable": True}, [1, None], ["x"]),
        ({"$ref": "#/$defs/c", "nullable": True, "$defs": {"c": COLOURS}}, ["red", None], ["blue"]),
        ({"properties": {"nullable": {"type": "integer", "nullable": False}}}, [{"nullable": 1}], [{"nullable": None}]),
        ({"properties": {"a": {"not": {}}, "b": {"type": "integer"}}}, [{"b": 1}, {}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"type": "string"}}, [{"any": 1}], [[]]),
        (
            {
                "propertyNames": {"$ref": "#/$defs/c"},
                "additionalProperties": {"type": "integer"},
                "$defs": {"c": COLOURS},
            },
            [{"red": 1}, {"red": 1, "green": 2}, {}],
            [{"blue": 1}, {"red": "x"}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"xy": 1}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
        (
            {"type": "array", "items": COLOURS, "uniqueItems": True},
            [[], ["green", "red"], ["red"]],
            [["red", "red"], ["blue"]],
        ),
        (
            {"type": ["array", "null"], "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True, "minItems": 2},
            [[1, 5], [1, 2, 3, 4, 5], None],
            [[1], [1, 1]],
        ),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [["x"]], [["x", "y"]]),
        ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
        (
            {"oneOf": TAGGED, "discriminator": {"propertyName": "kind"}},
            [{"kind": "a", "size": 1}, {"kind": "b"}],
            [{"size": 1}, {"kind": "c"}],
        ),
        (
            {
                "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
                "$defs": dict(zip("ab", TAGGED, strict=True)),
            },
            [{"pet": {"kind": "b", "size": 1}}],
            [{"pet": {"size": 1}}],
        ),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
            [{"a": 1, "b": 2}],
            [{"a": 1, "c": 2}],
        ),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}]),
        ({"type": "string", "pattern": "^(?=.*[0-9])(?!.*\\.\\.)[a-z0-9.]{3,}$"}, ["a.1"], ["abc", "a..1", "a1"]),
        ({"type": "string", "pattern": "^(?!.*x)", "allOf": [{"minLength": 2}]}, ["ab"], ["a", "ax"]),
    ],
)
def test_rewritten_schema_allows_what_it_allowed(
    vocabulary: GrammarVocabulary, schema: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    assert [value for value in allowed if not allows(vocabulary, schema, value)] == []
    assert [value for value in refused if allows(vocabulary, schema, value)] == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"tags": {"items": {}, "uniqueItems": True}}}, "properties.tags.uniqueItems"),
        ({"properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"not": {"const": 1}}}}, "$defs.T.not"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?<=a)b"}]}, "anyOf.1.pattern"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"items": {"propertyNames": {"not": {"const": "a"}}}}, "items.propertyNames"),
        ({"properties": {"a": {"$ref": "http://example.com/a"}}}, "properties.a.$ref"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ],
)
def test_problem_of_a_schema_names_its_place(schema: dict[str, Any], place: str) -> None:
    assert f"cannot be held at {place}: " in located_problem(json_schema_grammar(schema, Budget()))


def test_schema_that_can_be_held_has_no_problem() -> None:
    assert located_problem(json_schema_grammar({"type": "string"}, Budget())) == ""
    assert located_problem('start: "a"') == ""


KEYWORDS = [
    *(
        "type",
        "properties",
        "required",
        "items",
        "uniqueItems",
        "minItems",
        "maxItems",
        "oneOf",
        "anyOf",
        "allOf",
        "not",
    ),
    *(
        "propertyNames",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "pattern",
        "format",
        "enum",
    ),
    *("const", "nullable", "minProperties", "maxProperties", "minLength", "$ref", "$defs", "maximum", "a"),
]
junk = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 2, 1.5, "a", "object", "string", "array", "#/$defs/a", "#", "^(?=a)", "date"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), junk, max_size=6))
def test_malformed_schemas_are_held_or_refused(schema: dict[str, Any]) -> None:
    with suppress(RequestError):
        located_problem(json_schema_grammar(schema, Budget()))


def test_schema_whose_branches_repeat_themselves_ends() -> None:
    branch = {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]}
    with suppress(RequestError):
        json_schema_grammar({"oneOf": [branch, branch], "$defs": {"b": branch}}, Budget())
