"""Grammars for structured outputs: compiled against a vocabulary, they give the mask of allowed next tokens.

A grammar travels in llguidance's serialized form. llguidance is imported when a tokenizer is loaded; its errors become
RequestError here. It recurses once per rule that refers to another. So grammars are compiled and masks computed on
threads with a stack of ``STACK_BYTES``, which the longest grammar cannot exhaust (``start_thread``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from time import thread_time
from typing import TYPE_CHECKING, Any

from pdserve.errors import RequestError
from pdserve.records import TokenMask
from pdserve.tokenizer_tokens import TokenizerTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 128 * 1024  # longest grammar
STACK_BYTES = 256 * 1024 * 1024  # reserved, not used: the deepest recursion of MAX_BYTES took 90 MB

SLOW_MASK = 1e-3  # seconds of CPU; usual masks take 30 – 400 µs, with a vocabulary of 150,000 tokens
MAX_MASK = 10e-3  # seconds of CPU, on average; with slower masks an output waits most of the time
_SURE_SECONDS = 1.0  # CPU time of masks before a compiled grammar's average is checked

_MAX_ADDED_TOKEN = 256  # bytes of the text of an added token
_MAX_PROBLEM = 300  # characters of an llguidance message


def start_thread(work: Callable[[], None], name: str) -> None:
    """Run ``work`` on a daemon thread with a stack large enough for grammars."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    finally:
        threading.stack_size(before)


def check_size(grammar: str) -> None:
    """Raises RequestError if the grammar is too long."""
    size = len(grammar.encode())
    if size > MAX_BYTES:
        raise RequestError(f"the grammar takes {size} bytes, the limit is {MAX_BYTES}; simplify it", "grammar")


# ---------------------------------------------------------------- conversion from other notations


def from_json_schema(schema: str, whitespace: str | None = None) -> str:
    """Convert a JSON schema. ``whitespace`` is a regex for the text between JSON tokens."""
    from llguidance import LLMatcher

    # An unsupported feature is an error, also if "x-guidance" in the schema is lenient.
    overrides: JsonCompileOptions = {"lenient": False}
    if whitespace == "":
        overrides["whitespace_flexible"] = False
    elif whitespace is not None:
        overrides["whitespace_pattern"] = whitespace
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)


@lru_cache(256)
def knows_format(name: str) -> bool:
    """Whether the ``format`` of a JSON schema is one that grammars hold."""
    return not json_schema_problem({"type": "string", "format": name})


def json_schema_problem(schema: Any) -> str:
    """Return why a JSON schema cannot be held, in one line; empty if it can."""
    from llguidance import LLMatcher

    failed, words = LLMatcher.validate_grammar_with_warnings(from_json_schema(json.dumps(schema)))
    return _one_line(words[0]) if failed else ""


def from_regex(regex: str) -> str:
    """Convert a regex (Rust syntax) that the whole text must match."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def from_ebnf(text: str) -> str:
    """Convert GBNF, the notation of llama.cpp. Raises RequestError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    check_size(text)
    try:
        return str(gbnf_to_lark(text))
    except Exception as exc:  # gbnf_to_lark raises many kinds
        raise RequestError(_one_line(str(exc)) or "it is nested too deeply", "grammar") from exc


def from_structures(structures: Iterable[tuple[str, str, dict[str, Any], str]]) -> str:
    """Allow free text with structures, each (trigger, begin, JSON schema, end); ``begin`` starts with the trigger."""
    from llguidance import StructTag

    tags = [StructTag(trigger=t, begin=begin, grammar=schema, end=end) for t, begin, schema, end in structures]
    return StructTag.to_grammar(tags, assume_special=False)


# ---------------------------------------------------------------- compiled grammars


class GrammarVocabulary:
    """A model's tokens in the form that grammars need. Its constructor holds the GIL: 1.3 s for 150,000 tokens."""

    def __init__(self, tokenizer_json: str, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()) -> None:
        """``vocab_size`` is the model's. Default: the tokenizer's, also of the end tokens. Raises ValueError.

        A model may have weights for more tokens than the tokenizer, and the tokenizer tokens without weights, such as
        a [PAD] that was added later: no mask allows these.
        """
        from llguidance import LLTokenizer

        num_tokens = TokenizerTokens.decode(tokenizer_json).num_tokens
        self.vocab_size = num_tokens if vocab_size is None else vocab_size
        self.tokenizer: LLTokenizer = LLTokenizer(
            tokenizer_json, n_vocab=max(self.vocab_size, num_tokens), eos_token=list(eos_token_ids) or None
        )

    def mask_of(self, bits: bytes) -> bytes:
        """Return llguidance's bits in the length of TokenMask, without tokens that have no weights."""
        mask = bits[: TokenMask.num_bytes(self.vocab_size)]
        if self.tokenizer.vocab_size == self.vocab_size:
            return mask
        allowed = int.from_bytes(mask, "little") & ((1 << self.vocab_size) - 1)
        return allowed.to_bytes(len(mask), "little")


class Grammar:
    """A compiled grammar: its first mask, new matchers, and the mean time of its masks."""

    def __init__(self, text: str, vocabulary: GrammarVocabulary) -> None:
        """Raises RequestError with the error or the unsupported feature."""
        from llguidance import LLMatcher

        check_size(text)
        wrong, words = LLMatcher.validate_grammar_with_warnings(text, vocabulary.tokenizer)
        lenient = [word for word in words if word.startswith("Unimplemented")]
        if wrong or lenient:
            raise RequestError(_one_line((lenient or words)[0]), "grammar")
        self._matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0)
        self.vocabulary = vocabulary
        self._num_masks = 0
        self._mask_seconds = 0.0  # CPU time of all masks
        self.first_mask = self.matcher().mask()
        if self._mask_seconds > MAX_MASK:
            self._mask_seconds = 0.0  # the first time, memory was cold
            self.matcher().mask()
            if self._mask_seconds > MAX_MASK:
                raise self._too_slow(self._mask_seconds)

    def matcher(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self)

    @property
    def slow(self) -> bool:
        return self._mask_seconds > SLOW_MASK * self._num_masks

    def count_mask(self, seconds: float) -> None:
        """Count the CPU time of a mask. Raises RequestError beyond MAX_MASK. Any thread may call it."""
        self._num_masks += 1
        self._mask_seconds += seconds
        if self._mask_seconds > max(_SURE_SECONDS, MAX_MASK * self._num_masks):
            raise self._too_slow(self._mask_seconds / self._num_masks)

    def _too_slow(self, seconds: float) -> RequestError:
        problem = (
            f"the grammar takes {seconds * 1e3:.0f} ms of computation per token, the limit is {MAX_MASK * 1e3:g} ms"
        )
        return RequestError(f"{problem}; shorten its literals, repetitions or regexes", "grammar")


class Matcher:
    """The position of an output in its grammar. For one thread at a time; it releases the GIL while it works."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar) -> None:
        self._matcher = matcher
        self._grammar = grammar

    def copy(self) -> Matcher:
        """Return a matcher at the same position."""
        return Matcher(self._matcher.deep_copy(), self._grammar)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens. A token that the grammar forbids makes the next ``mask`` fail."""
        self._matcher.consume_tokens(list(token_ids))

    def _compute_mask(self) -> bytes:
        """Return llguidance's mask, in the length of TokenMask.

        Where the text is forced, it allows the first token of that text alone. If the text begins with the text of an
        added token, the mask allows this token, which the matcher does not accept for its text. The text's ordinary
        tokens replace it, and also a token without weights.
        """
        vocabulary = self._grammar.vocabulary
        bits = self._matcher.compute_bitmask()
        token_id = _only_token(bits)
        if token_id is None or (token_id < vocabulary.vocab_size and self._matcher.validate_tokens([token_id])):
            return vocabulary.mask_of(bits)
        forced = self._matcher.compute_ff_bytes()[:_MAX_ADDED_TOKEN]
        for end in range(len(forced) - 1, 0, -1):
            token_ids = vocabulary.tokenizer.tokenize_bytes(forced[:end])
            if token_ids and token_ids[0] < vocabulary.vocab_size and self._matcher.validate_tokens(token_ids[:1]):
                return _mask_of(token_ids[0], TokenMask.num_bytes(vocabulary.vocab_size))
        return vocabulary.mask_of(bits)

    def mask(self) -> bytes:
        """Return the mask for ``TokenMask.words``. At the grammar's end it allows only an end of sequence.

        Raises RequestError if the grammar takes too much time or memory, or allows no token.
        """
        begun = thread_time()
        words = b"" if self._matcher.is_error() else self._compute_mask()
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}", "grammar")
        if words.count(0) == len(words):
            raise RequestError("the grammar allows no token of the vocabulary here; allow for another way", "grammar")
        self._grammar.count_mask(thread_time() - begun)
        return words


def _only_token(mask: bytes) -> int | None:
    """Return the only token that a mask allows; None if there are several or none."""
    if mask.count(0) != len(mask) - 1:
        return None
    (at, byte) = next((at, byte) for at, byte in enumerate(mask) if byte)
    return 8 * at + byte.bit_length() - 1 if byte.bit_count() == 1 else None


def _mask_of(token_id: int, num_bytes: int) -> bytes:
    return (1 << token_id).to_bytes(num_bytes, "little")


def without(mask: bytes, token_ids: Collection[int]) -> bytes:
    """Return the mask without these tokens, or unchanged if none would be left."""
    words = bytearray(mask)
    for token_id in token_ids:
        words[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return mask if words.count(0) == len(words) else bytes(words)


def intersection(mask: bytes, allowed: Sequence[bytes]) -> bytes:
    """Return the tokens that a grammar and the first possible one of other masks allow. Raises RequestError."""
    for rules in allowed:
        if both := int.from_bytes(mask, "little") & int.from_bytes(rules, "little"):
            return both.to_bytes(len(mask), "little")
    names = "allowed_token_ids, bad_words or thinking_token_budget"
    raise RequestError(f"the grammar allows no token here that {names} allows, too; leave them out", "grammar")


def _one_line(text: str) -> str:
    """Return an llguidance message without its parser state."""
    line = " ".join(text.partition("<state>")[0].split())
    return line if len(line) <= _MAX_PROBLEM else line[:_MAX_PROBLEM] + "…"
