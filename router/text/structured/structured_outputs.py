"""Converts structured-output fields to grammars of llguidance: OpenAI's response_format, vLLM's structured_outputs, and
the older guided_* fields; SGLang's fields.

A grammar is in llguidance's Lark variant, or in GBNF or other EBNF (``root ::= …``). ``GrammarChecker`` translates
EBNF and checks that a grammar is valid; the functions do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from pdserve import grammar as grammars
from pdserve.errors import RequestError, shown
from router.text.structured.normalized_schemas import held_schema
from router.text.structured.work_budget import Budget

MAX_STRUCTURES = 128  # structures, or triggers, per structural tag


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's field; exactly one of the first six is set."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False  # no white space in JSON
    whitespace_pattern: str | None = None  # white space between the parts of JSON


class OutputGrammar(msgspec.Struct, frozen=True):
    """A grammar and the request field that it comes from; both empty for none."""

    text: str = ""
    field: str = ""
    is_ebnf: bool = False  # needs translation to Lark

    def check_size(self) -> None:
        """Raises RequestError that names the field if the grammar is too long."""
        with in_field(self.field):
            grammars.check_size(self.text)


class Structure(msgspec.Struct, frozen=True):
    """The field of a request that gives the structure of its output; ``make`` converts it to a grammar."""

    field: str = ""
    make: Callable[[Budget], str] | None = None
    is_ebnf: bool = False

    def grammar(self, budget: Budget) -> OutputGrammar:
        """Raises RequestError that names the field."""
        if self.make is None:
            return OutputGrammar()
        with in_field(self.field):
            grammar = OutputGrammar(self.make(budget), self.field, self.is_ebnf)
        grammar.check_size()
        return grammar


@contextmanager
def in_field(field: str) -> Iterator[None]:
    """Name the field in errors of its value."""
    try:
        yield
    except RequestError as exc:
        exc.args = (f"{field}: {exc}",)
        exc.param = field
        raise


ANY_OBJECT: dict[str, Any] = {"type": "object"}


def json_schema_grammar(schema: dict[str, Any] | str, budget: Budget, *, whitespace: str | None = None) -> str:
    """JSON that follows a schema, given as an object or its text; ``whitespace`` is a regex, "" for no white space.

    Objects have no properties but the declared ones (closed_schemas.py). Raises RequestError for text that is not a
    JSON object, and WorkExceeded.
    """
    if isinstance(schema, str):
        grammars.check_size(schema)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise RequestError(f"the schema is not valid JSON: {exc}") from exc
        if not isinstance(schema, dict):
            raise RequestError(f"a schema must be a JSON object, not {type(schema).__name__}")
    text = budget.encoded(held_schema(schema, budget)).decode()
    grammars.check_size(text)
    return grammars.from_json_schema(text, whitespace)


def choice_grammar(texts: Sequence[str], budget: Budget) -> str:
    """One of these texts. Raises RequestError without texts, and for an empty one."""
    if not texts or "" in texts:
        raise RequestError("choice must be a list of at least one string, none of them empty")
    budget.spend_chars(sum(map(len, texts)))
    budget.spend(len(texts))
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _lark_or_ebnf(text: str, budget: Budget) -> str:
    if not text.strip():
        raise RequestError("the grammar is empty; give at least the rule start")
    return text


def _regex_grammar(regex: str, budget: Budget) -> str:
    if not regex:
        raise RequestError("the regex is empty, so that no output could follow it; leave it out")
    return grammars.from_regex(regex)


def structural_tag_grammar(tag: dict[str, Any] | str, budget: Budget) -> str:
    """Free text in which a trigger starts one of the structures: a begin, JSON of a schema, an end.

    Takes vLLM's ``{"type": "structural_tag", "structures": […], "triggers": […]}``. Raises RequestError, and
    WorkExceeded.
    """
    if isinstance(tag, str):
        grammars.check_size(tag)
    try:
        spec = msgspec.convert(msgspec.json.decode(tag) if isinstance(tag, str) else tag, _StructuralTag)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise RequestError(f"the structural tag is not valid: {exc}") from exc
    if max(len(spec.structures), len(spec.triggers)) > MAX_STRUCTURES:
        raise RequestError(f"the structural tag has more than {MAX_STRUCTURES} structures or triggers; send fewer")
    parts = []
    for structure in spec.structures:
        trigger = next((trigger for trigger in spec.triggers if trigger and structure.begin.startswith(trigger)), None)
        if trigger is None:
            raise RequestError(f"no trigger is the beginning of the structure {shown(structure.begin)}; add one")
        schema = held_schema(structure.schema or ANY_OBJECT, budget)
        budget.spend_value(schema)
        parts.append((trigger, structure.begin, schema, structure.end))
    if not parts:
        raise RequestError("the structural tag has no structures; give at least one")
    return grammars.from_structures(parts)


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] = {}


class _StructuralTag(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]


def requested_structure(
    response_format: dict[str, Any], structured_outputs: StructuredOutputs | None, others: dict[str, dict[str, Any]]
) -> Structure:
    """Return the structure of a request. ``others`` are further fields, each as a field of StructuredOutputs.

    Raises RequestError if two are given.
    """
    given: list[Structure] = []
    if response_format and response_format.get("type") != "text":
        given.append(Structure("response_format", partial(_response_format_grammar, response_format)))
    fields = {name: StructuredOutputs(**value) for name, value in others.items()}
    if structured_outputs is not None:
        fields = {"structured_outputs": structured_outputs, **fields}
    for name, outputs in fields.items():
        is_ebnf = name == "ebnf" or "::=" in (outputs.grammar or "")
        given.append(Structure(name, partial(_structured_outputs_grammar, outputs), is_ebnf))
    if len(given) > 1:
        names = " and ".join(structure.field for structure in given)
        raise RequestError(f"{names} exclude each other; give one of them", given[-1].field)
    return given[0] if given else Structure()


def _response_format_grammar(value: dict[str, Any], budget: Budget) -> str:
    match value:
        case {"type": "json_object" | "json_schema" as kind}:
            schema = _schema_of(value)
            if schema is None and kind == "json_schema":
                raise RequestError("json_schema.schema is missing; give the schema as an object there")
            if kind == "json_object" and not schema:
                schema = ANY_OBJECT
            return json_schema_grammar(schema or {}, budget)
        case {"type": "structural_tag"}:
            return structural_tag_grammar(value, budget)
        case _:
            problem = f"type {shown(value['type'])} is not known" if "type" in value else "type is missing"
            raise RequestError(f"{problem}; use text, json_object or json_schema")


def _schema_of(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a response format, in OpenAI's place or beside the type, as in llama.cpp and Together.

    None without a schema. Raises RequestError for one that is no object, and for two different ones.
    """
    wrapped = value.get("json_schema") or {}
    if not isinstance(wrapped, dict):
        raise RequestError(f"json_schema must be an object, not {type(wrapped).__name__}")
    schemas = [schema for schema in (wrapped.get("schema"), value.get("schema")) if schema is not None]
    for schema in schemas:
        if not isinstance(schema, dict):
            raise RequestError(f"the schema must be an object, not {type(schema).__name__}")
        if schema != schemas[0]:
            raise RequestError("schema and json_schema.schema differ; give one of them")
    return schemas[0] if schemas else None


_GRAMMARS: dict[str, Callable[[Any, Budget], str]] = {
    "regex": _regex_grammar,
    "choice": choice_grammar,
    "grammar": _lark_or_ebnf,
    "structural_tag": structural_tag_grammar,
}


def _structured_outputs_grammar(value: StructuredOutputs, budget: Budget) -> str:
    kinds = ("json", "json_object", *_GRAMMARS)
    given = [kind for kind in kinds if getattr(value, kind) not in (None, False)]
    if len(given) != 1:
        held = " and ".join(given) or "none"
        raise RequestError(f"it must hold exactly one of {', '.join(kinds)}; it holds {held}")
    kind = given[0]
    if kind in _GRAMMARS:
        return _GRAMMARS[kind](getattr(value, kind), budget)
    schema = ANY_OBJECT if value.json is None else value.json
    whitespace = "" if value.disable_any_whitespace else value.whitespace_pattern
    return json_schema_grammar(schema, budget, whitespace=whitespace)
