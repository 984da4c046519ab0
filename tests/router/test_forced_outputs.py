"""Outputs that the grammar of strict functions forces, token by token: each is read as calls by their schemas, whole or
cut anywhere.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
import small_tokenizers
from tokenizers import AddedToken, Tokenizer

from pdserve.grammar import Grammar, GrammarVocabulary
from router.text.chat.families.typed_values import typed_values
from router.text.chat.output_parser import Message, MessageBuilder, OutputParser
from router.text.chat.parsers import TOOL_PARSERS
from router.text.chat.strict_tools import Frame
from router.text.chat.tool_grammar import Marker
from router.text.chat.tools import tool_use
from router.text.structured.work_budget import Budget

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": -9, "maximum": 99},
            "unit": {"enum": ["m", "km", "mile"]},
            "exact": {"type": "boolean"},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
            "note": {"type": "string", "maxLength": 8},
        },
        "required": ["count", "unit"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
MARKERS = [*dict.fromkeys(marker for form in TOOL_PARSERS.values() for marker in form.markers)]
WALKS = 12
LONGEST = 400  # tokens of a walk; a longer one is given up
CLOSING = frozenset('"}]<')  # tokens that end values: half of the choices, so that walks end


class Writer:
    """Writes random texts that a grammar allows."""

    def __init__(self, added: bool) -> None:
        """``added``: markers are tokens, as in the family's own tokenizer."""
        self.backend = small_tokenizers.byte_level()
        if added:
            self.backend.add_tokens([AddedToken(text, special=False) for text in MARKERS])
        self.eos: int = self.backend.token_to_id("<|im_end|>") or 0
        self.vocabulary = GrammarVocabulary(self.backend.to_str(), eos_token_ids=[self.eos])
        self._texts = [self.backend.decode([token]) for token in range(self.backend.get_vocab_size())]
        self._markers = {token for token, text in enumerate(self._texts) if text in MARKERS}

    def marker(self, text: str) -> Marker:
        return Marker(text, self.backend.token_to_id(text) if self._markers else None)

    def write(self, grammar: Grammar, chance: random.Random) -> list[int] | None:
        """Return the tokens of a walk to the end of the grammar; None if that does not come soon."""
        matcher = grammar.matcher()
        tokens = list[int]()
        while len(tokens) < LONGEST:
            bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
            allowed: list[int] = np.flatnonzero(bits[: len(self._texts)]).tolist()
            if self.eos in allowed and (len(allowed) == 1 or chance.random() < 0.5):
                return tokens
            allowed = [token for token in allowed if token != self.eos]
            closing = [token for token in allowed if token in self._markers or set(self._texts[token]) <= CLOSING]
            token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
            matcher.consume([token])
            tokens.append(token)
        return None


WRITERS = {added: Writer(added) for added in (False, True)}


def parse(parser: OutputParser, texts: list[str]) -> Message:
    builder = MessageBuilder()
    for text in texts:
        builder.add(parser.push(text))
    builder.add(parser.flush())
    return builder.message()


def pieces(backend: Tokenizer, tokens: list[int]) -> list[str]:
    """Return the text token by token, as a stream has it: a token that ends amid a character adds nothing yet."""
    texts = []
    sent = ""
    for end in range(1, len(tokens) + 1):
        text = backend.decode(tokens[:end], skip_special_tokens=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            texts.append(text[len(sent) :])
            sent = text
    return texts


@pytest.mark.parametrize("added", [False, True], ids=["texts", "added tokens"])
@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_forced_outputs_are_read_alike_whole_and_in_pieces(family: str, added: bool) -> None:
    writer = WRITERS[added]
    chance = random.Random(family)
    form = TOOL_PARSERS[family]
    use = tool_use(TOOLS, "auto", True)
    grammar = Grammar(form.grammar(use, writer.marker, Frame(alone=True), Budget()), writer.vocabulary)
    num_calls: dict[str, int] = dict.fromkeys(SCHEMAS, 0)
    for _ in range(WALKS):
        tokens = writer.write(grammar, chance)
        if tokens is None:
            continue
        streamed = pieces(writer.backend, tokens)
        text = "".join(streamed)
        whole = parse(form.parser(typed_values(use.schemas), True), [text])
        assert whole.calls, text
        assert not whole.content.strip(), text
        for call in whole.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            num_calls[call.name] += 1
        assert parse(form.parser(typed_values(use.schemas), True), streamed) == whole, text
        assert parse(form.parser(typed_values(use.schemas), True), list(text)) == whole, text
    assert min(num_calls.values()) >= 2, num_calls
