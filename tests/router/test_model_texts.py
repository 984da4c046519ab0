"""Texts as models write them become what a client must get, however they arrive (support/model_texts.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import small_tokenizers
from model_texts import FORMATS, ModelText, found_in, parsers_of, state_of, texts_of, use_of
from tokenizers import AddedToken

from pdserve.grammar import Grammar, GrammarVocabulary
from router.text.chat.families.harmony_grammar import harmony_grammar
from router.text.chat.output_parser import Message, MessageBuilder
from router.text.chat.output_parsing import select_parsing
from router.text.chat.strict_tools import Frame, Reasoning
from router.text.chat.tool_grammar import Marker, after_reasoning, tool_call_grammar
from router.text.structured.work_budget import Budget

TEXTS = [pytest.param(form, text, id=f"{form}: {text.habit}") for form in FORMATS for text in texts_of(form)]


def cuts(text: str) -> Iterator[list[str]]:
    """Yield the text whole, by characters, and cut at random."""
    yield [text]
    yield list(text)
    for seed in range(3):
        ends = sorted(random.Random(seed).choices(range(len(text) + 1), k=len(text) // 9))
        yield [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def parsed(form: str, text: ModelText, pieces: list[str]) -> Message:
    state = state_of(form, text.opened)
    parsing = select_parsing(use_of(form), parsers_of(form), state, include_reasoning=True)
    assert parsing is not None
    parser = parsing.new_parser()
    builder = MessageBuilder()
    for piece in pieces:
        builder.add(parser.push(piece))
    builder.add([] if parsing.forced else parser.flush(finished=text.finish == "stop"))
    return builder.message()


def test_corpus_has_texts_of_each_format() -> None:
    assert len(TEXTS) >= 120
    assert len(FORMATS) == 13
    assert all(len(texts_of(form)) >= 10 for form in FORMATS)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_client_gets_what_the_model_meant(form: str, text: ModelText) -> None:
    for pieces in cuts(text.text):
        assert found_in(parsed(form, text, pieces)) == text.expected


@pytest.mark.parametrize(
    ("form", "added"), [(form, added) for form in FORMATS for added in (False, True) if added or form != "openai"]
)
def test_legal_text_is_allowed_by_the_strict_grammar(form: str, added: bool) -> None:
    backend = small_tokenizers.byte_level()
    parsers = parsers_of(form)
    assert parsers.tools is not None
    assert parsers.reasoning is not None
    if added:
        tags = [*parsers.tools.markers, parsers.reasoning.start, parsers.reasoning.end]
        backend.add_tokens([AddedToken(tag, special=False) for tag in tags if not tag.startswith("<|channel|>a")])
    eos: int = backend.token_to_id("<|im_end|>") or 0
    vocabulary = GrammarVocabulary(backend.to_str(), eos_token_ids=[eos])

    def marker(text: str) -> Marker:
        return Marker(text, backend.token_to_id(text) if added else None)

    use = use_of(form, strict=True)
    for text in texts_of(form):
        reasoning = Reasoning(marker(parsers.reasoning.start), marker(parsers.reasoning.end), text.opened)
        if form == "openai":
            grammar = harmony_grammar(use, marker, "", Budget())
        elif use.must_call:
            forced = tool_call_grammar(use, Budget())
            grammar = after_reasoning(forced, reasoning.start, reasoning.end, opened=text.opened)
        else:
            grammar = parsers.tools.grammar(use, marker, Frame(reasoning=reasoning), Budget())
        matcher = Grammar(grammar, vocabulary).matcher()
        allowed = True
        for token_id in [*backend.encode(text.text, add_special_tokens=False).ids, eos]:
            allowed = allowed and bool(matcher.mask()[token_id // 8] >> token_id % 8 & 1)
            if not allowed:
                break
            matcher.consume([token_id])
        assert allowed or not text.legal, text.habit
