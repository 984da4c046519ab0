"""Grammars that an output has to follow: compiled against a vocabulary, and which tokens they allow next.

A grammar travels as llguidance serializes it. llguidance is imported when a tokenizer is loaded; its errors become
RequestError here. It recurses once for each rule that refers to another, so whatever compiles a grammar or asks for a
mask does it on a thread with a stack of ``STACK_BYTES``, which the longest grammar cannot exhaust (``start_thread``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pdserve.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 128 * 1024  # of a grammar
STACK_BYTES = 256 * 1024 * 1024  # reserved, not used: the deepest recursion of MAX_BYTES took 90 MB

_MAX_PROBLEM = 300  # characters of what llguidance says


def start_thread(work: Callable[[], None], name: str) -> None:
    """Run ``work`` on a daemon thread that may compile grammars and use them."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    finally:
        threading.stack_size(before)


def check_size(grammar: str) -> None:
    """Raises RequestError for a grammar that is too long."""
    size = len(grammar.encode())
    if size > MAX_BYTES:
        raise RequestError(f"the grammar takes {size} bytes, the limit is {MAX_BYTES}; simplify it", "grammar")


# ---------------------------------------------------------------- from other notations


def from_json_schema(schema: str, whitespace: str | None = None) -> str:
    """JSON by a schema, given as text that is JSON. ``whitespace`` is a regex of what may be between its parts."""
    from llguidance import LLMatcher

    # Whatever "x-guidance" in the schema says: what is not supported is an error.
    overrides: JsonCompileOptions = {"lenient": False}
    if whitespace == "":
        overrides["whitespace_flexible"] = False
    elif whitespace is not None:
        overrides["whitespace_pattern"] = whitespace
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)


def from_regex(regex: str) -> str:
    """Text that a regex (Rust's syntax) matches as a whole."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def from_ebnf(text: str) -> str:
    """GBNF, the notation of llama.cpp. Raises RequestError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    check_size(text)
    try:
        return str(gbnf_to_lark(text))
    except Exception as exc:  # whatever its parser meets
        raise RequestError(_one_line(str(exc)) or "it is nested too deeply", "grammar") from exc


def from_structures(structures: Iterable[tuple[str, str, dict[str, Any], str]]) -> str:
    """Free text with structures, each (trigger, begin, JSON schema, end); ``begin`` starts with the trigger."""
    from llguidance import StructTag

    tags = [StructTag(trigger=t, begin=begin, grammar=schema, end=end) for t, begin, schema, end in structures]
    return StructTag.to_grammar(tags, assume_special=False)


# ---------------------------------------------------------------- compiled


class GrammarVocabulary:
    """The tokens of a model, as grammars need them. Making it holds the GIL: 1.3 s for 150,000 tokens."""

    def __init__(self, tokenizer_json: str, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()) -> None:
        """``vocab_size`` is the model's, which may be padded. Raises ValueError where it is too small.

        Without ``eos_token_ids`` the tokenizer's own is taken.
        """
        from llguidance import LLTokenizer

        eos = list(eos_token_ids) or None
        self.tokenizer: LLTokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)


class Grammar:
    """One that has been compiled: its first mask, and matchers that begin with it."""

    def __init__(self, text: str, vocabulary: GrammarVocabulary) -> None:
        """Raises RequestError, saying what is wrong with it or not supported."""
        from llguidance import LLMatcher

        check_size(text)
        wrong, words = LLMatcher.validate_grammar_with_warnings(text, vocabulary.tokenizer)
        lenient = [word for word in words if word.startswith("Unimplemented")]  # what the grammar asked to ignore
        if wrong or lenient:
            raise RequestError(_one_line((lenient or words)[0]), "grammar")
        self._matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0)
        self.first_mask = Matcher(self._matcher.deep_copy()).mask()

    def matcher(self) -> Matcher:
        """A new one, at the beginning."""
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """Where an output is in its grammar. For one thread at a time; other threads of Python go on meanwhile."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these. What the grammar does not allow is an error of the next ``mask``."""
        self._matcher.consume_tokens(list(token_ids))

    def mask(self) -> bytes:
        """What ``TokenMask.words`` has: allows only an end of sequence where the grammar has come to its end.

        Raises RequestError where the grammar takes too much time or memory, or lets nothing follow.
        """
        words = b""
        if not self._matcher.is_error():
            words = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}", "grammar")
        if words.count(0) == len(words):
            raise RequestError("the grammar allows no token of the vocabulary here; allow for another way", "grammar")
        return words


def without(mask: bytes, token_ids: Collection[int]) -> bytes:
    """The mask with these tokens taken out, unless nothing would be left."""
    words = bytearray(mask)
    for token_id in token_ids:
        words[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return mask if words.count(0) == len(words) else bytes(words)


def _one_line(text: str) -> str:
    """llguidance's words without the state of its parser."""
    line = " ".join(text.partition("<state>")[0].split())
    return line if len(line) <= _MAX_PROBLEM else line[:_MAX_PROBLEM] + "…"
