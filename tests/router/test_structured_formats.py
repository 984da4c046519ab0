"""Grammars of request fields, and the errors of grammars that do not compile in time."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import patience

from pdserve.errors import RequestError
from pdserve.grammar import MAX_BYTES, Grammar, GrammarVocabulary, start_thread, without
from router.text.fair_slots import CLIENT
from router.text.structured import grammar_checker as checker
from router.text.structured.grammar_checker import GrammarChecker
from router.text.structured.structured_outputs import (
    OutputGrammar,
    choice_grammar,
    json_schema_grammar,
    requested_structure,
    structural_tag_grammar,
)
from router.text.structured.work_budget import Budget

TOKENIZER = small_tokenizers.byte_level()
END = int(TOKENIZER.token_to_id("<|im_end|>") or 0)


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(TOKENIZER.to_str(), eos_token_ids=[END])


def ask(questions: Callable[[GrammarChecker], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function with a checker of its own."""

    async def session() -> None:
        grammars = GrammarChecker(TOKENIZER.to_str)
        try:
            await questions(grammars)
        finally:
            await grammars.close()

    asyncio.run(session())


def structure_grammar(response_format: dict[str, Any], guided_grammar: str = "") -> OutputGrammar:
    others = {"guided_grammar": {"grammar": guided_grammar}} if guided_grammar else {}
    return requested_structure(response_format, None, others).grammar(Budget())


def follows(vocabulary: GrammarVocabulary, grammar: str, text: str) -> bool:
    """Whether the grammar may end with this text."""
    matcher = Grammar(grammar, vocabulary).matcher()
    matcher.consume(TOKENIZER.encode(text).ids)
    try:
        mask = matcher.mask()
    except RequestError:
        return False
    return bool(mask[END // 8] >> END % 8 & 1)


# Control characters may be escaped in several ways.
texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(value=json_values)
def test_constant_schema_allows_only_its_value(vocabulary: GrammarVocabulary, value: Any) -> None:
    grammar = json_schema_grammar({"const": value}, Budget(), whitespace="")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert follows(vocabulary, grammar, text)
    assert not follows(vocabulary, grammar, f"[{text}]")


@settings(max_examples=30, deadline=None)
@given(choices=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True))
def test_only_complete_choices_are_allowed(vocabulary: GrammarVocabulary, choices: list[str]) -> None:
    grammar = choice_grammar(choices, Budget())
    for choice in choices:
        assert follows(vocabulary, grammar, choice)
        assert follows(vocabulary, grammar, choice[:-1]) == (choice[:-1] in choices)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},  # llama.cpp, Together
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},  # llama.cpp
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}, "schema": SCHEMA},
    ],
    ids=json.dumps,
)
def test_schema_of_a_response_format_is_held_wherever_it_is(vocabulary: GrammarVocabulary, form: Any) -> None:
    grammar = structure_grammar(form).text
    assert follows(vocabulary, grammar, '{"a": 1}')
    assert not follows(vocabulary, grammar, '{"b": 1}')
    assert not follows(vocabulary, grammar, "{}")


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_object", "schema": None}], ids=json.dumps)
def test_json_object_without_a_schema_allows_any_object(vocabulary: GrammarVocabulary, form: Any) -> None:
    grammar = structure_grammar(form).text
    assert follows(vocabulary, grammar, '{"b": [1]}')
    assert not follows(vocabulary, grammar, "[1]")


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"schema": SCHEMA}, "type is missing; use text"),
        ({"type": "json_object", "schema": "{}"}, "the schema must be an object, not str"),
        ({"type": "json_object", "json_schema": [SCHEMA]}, "json_schema must be an object, not list"),
        ({"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": {}}}, "differ; give one of them"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema is missing"),
    ],
)
def test_response_format_with_an_unclear_schema_is_refused(form: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=f"response_format: .*{problem}"):
        structure_grammar(form)


def test_structural_tag_constrains_only_structures(vocabulary: GrammarVocabulary) -> None:
    structure = {"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}
    grammar = structural_tag_grammar(
        {"structures": [structure], "triggers": ["<f"], "type": "structural_tag"}, Budget()
    )
    assert follows(vocabulary, grammar, "well: <f=add>12</f> done")
    assert follows(vocabulary, grammar, "nothing to call")
    assert not follows(vocabulary, grammar, "<f=add>x</f>")
    assert not follows(vocabulary, grammar, "<f=sub>1</f>")
    with pytest.raises(RequestError, match="no trigger"):
        structural_tag_grammar({"structures": [structure], "triggers": ["<g"]}, Budget())


def test_default_fields_request_no_grammar() -> None:
    assert structure_grammar({}) == OutputGrammar()
    assert structure_grammar({"type": "text"}) == OutputGrammar()


@given(mask=st.binary(min_size=4, max_size=8), token_ids=st.frozensets(st.integers(0, 31)))
def test_tokens_are_removed_from_a_mask_unless_none_is_left(mask: bytes, token_ids: frozenset[int]) -> None:
    def tokens(words: bytes) -> set[int]:
        return {token for token in range(8 * len(words)) if words[token // 8] >> token % 8 & 1}

    assert tokens(without(mask, token_ids)) == (tokens(mask) - token_ids or tokens(mask))


def test_deepest_grammar_fits_the_stack(vocabulary: GrammarVocabulary) -> None:
    """Rules that refer to one another as deep as the limit of bytes allows: an overflow would end the process."""
    depth = 6000
    chain = "start: r0\n" + "".join(f'r{i}: r{i + 1} "x"\n' for i in range(depth)) + f'r{depth}: "a"\n'
    assert len(chain) < MAX_BYTES
    grammars: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
    start_thread(lambda: grammars.put(Grammar(chain, vocabulary)), "deep")
    assert grammars.get(timeout=patience(60)).first_mask


def test_slow_grammar_is_refused_and_the_next_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = OutputGrammar(
        "start: T0\n" + "".join(f'T{i}: T{i + 1} "x"\n' for i in range(6400)) + 'T6400: "a"\n', "guided"
    )
    quick = OutputGrammar('start: "a"', "guided_grammar")

    async def questions(grammars: GrammarChecker) -> None:
        await grammars.check(quick)
        monkeypatch.setattr(checker, "COMPILE_SECONDS", 1e-3)
        for _ in range(2):  # asked, and remembered
            with pytest.raises(RequestError, match="guided: it takes more than"):
                await grammars.check(slow)
        monkeypatch.undo()
        await grammars.check(quick)
        await grammars.check(OutputGrammar('start: "b"', "guided_grammar"))  # a new worker checks this grammar
        with pytest.raises(RequestError, match=r"guided_regex: .*unclosed group"):
            await grammars.check(OutputGrammar('{"grammars":[{"lark_grammar":"start: /(a/"}]}', "guided_regex"))

    ask(questions)


@pytest.mark.slow
def test_grammars_of_a_client_leave_a_process_to_others() -> None:
    """The busy client's EBNF takes long to translate: 0.3 s of CPU each."""
    ebnf = "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} "x"\n' for i in range(1200)) + 'r1200 ::= "a"\n'
    quick = OutputGrammar('start: "a"', "guided_grammar")
    ended: list[str] = []

    async def questions(grammars: GrammarChecker) -> None:
        async def ask(client: str, grammar: OutputGrammar) -> None:
            CLIENT.set(client)
            await grammars.check(grammar)
            ended.append(client)

        slow = [ask("busy", OutputGrammar(f"{ebnf}#{number}", "guided_grammar", is_ebnf=True)) for number in range(12)]
        tasks = [asyncio.create_task(question) for question in [*slow, ask("quiet", quick)]]
        await asyncio.gather(*tasks)

    ask(questions)
    assert ended.index("quiet") <= 4


def test_ebnf_is_translated() -> None:
    async def questions(grammars: GrammarChecker) -> None:
        lark = await grammars.translated(structure_grammar({}, guided_grammar='root ::= "a" | "b"'))
        await grammars.check(lark)
        assert not lark.is_ebnf
        assert "start:" in lark.text
        with pytest.raises(RequestError, match="guided_grammar: "):
            await grammars.translated(structure_grammar({}, guided_grammar="root ::= ("))

    ask(questions)


def test_grammar_with_a_long_literal_is_refused() -> None:
    """A mask takes time in proportion to the literal: an answer of 120 KB would take hours of CPU."""

    async def questions(grammars: GrammarChecker) -> None:
        ebnf = f'root ::= "{"the quick brown fox " * 6000}"'
        lark = await grammars.translated(structure_grammar({}, guided_grammar=ebnf))
        with pytest.raises(RequestError, match=r"takes \d+ ms of computation per token, the limit is 10 ms; shorten"):
            await grammars.check(lark)

    ask(questions)
