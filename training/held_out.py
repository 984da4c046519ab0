"""Held-out questions, tool calls and schemas, asked over the chat API: their names and wordings are never trained."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.conversations import Writer
from training.facts import Ask, entity_facts, fact_sheet
from training.tools import json_ask, tool_cases
from training.words import Words, words_of

QUESTIONS = 50
CALLS = 10
SCHEMAS = 10
MAX_TOKENS = 160
_SEED = 414
_CHARACTERS = (600, 1500, 3000, 4500, 5800)  # characters of a document; 2.9 make a token
_LONGER = 20  # characters that a right answer may be longer than the expected one
_NEAR = 60  # fewest tokens between an answer in the document and its question
_FAR = 2000  # most tokens between them


@dataclass(frozen=True)
class Case:
    """A request to /v1/chat/completions and what a right answer has.

    ``expected``: sentence and value for a question, name and arguments for a tool, the object for a schema.
    ``distance``: tokens from the value in the document to the question.
    """

    kind: str  # question, tool or schema
    body: dict[str, Any]
    expected: Any
    distance: int = 0

    def right(self, message: dict[str, Any]) -> bool:
        """Whether the message of a response answers the request."""
        content = message.get("content") or ""
        if self.kind == "question":
            sentence, value = self.expected
            named = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", content, re.IGNORECASE) is not None
            return named and len(content) <= len(sentence) + _LONGER
        if self.kind == "tool":
            calls = [call["function"] for call in message.get("tool_calls") or []]
            made = [(call["name"], _parsed(call["arguments"])) for call in calls]
            return made == [self.expected]
        filled: bool = _parsed(content) == self.expected
        return filled


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def cases(model_dir: Path) -> list[Case]:
    """Return all cases, the same in each call. ``model_dir`` has the tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    vocabulary, pieces = words_of(tokenizer.get_vocab())
    words = Words(random.Random(_SEED), True, vocabulary, pieces)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    makers: list[tuple[int, Callable[[int], Case | None]]] = [
        (QUESTIONS, lambda index: _question(words, Writer(words, encode), encode, index)),
        (CALLS, lambda _: _call(words)),
        (SCHEMAS, lambda _: _schema(words)),
    ]
    cases: list[Case] = []
    for count, make in makers:
        done = 0
        while done < count:
            words.start()
            if case := make(done):
                cases.append(case)
                done += 1
    return cases


def _body(messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}


def _question(words: Words, writer: Writer, encode: Callable[[str], list[int]], index: int) -> Case | None:
    """A question about a document; None if this one has none in the range of distances."""
    text, asks = writer.document(_CHARACTERS[index % len(_CHARACTERS)])
    usable: list[tuple[int, Ask]] = []
    for asked, task in asks:
        if task != "json" and (at := text.find(asked.value)) >= 0 and text.count(asked.value) == 1:
            distance = len(encode(text[at:]))
            if _NEAR <= distance <= _FAR:
                usable.append((distance, asked))
    if not usable:
        return None
    distance, asked = (
        max(usable, key=lambda distance_and_ask: distance_and_ask[0]) if index % 2 else words.rng.choice(usable)
    )
    content = f"{text}\n\n{asked.question}"
    return Case("question", _body([{"role": "user", "content": content}]), (asked.answer, asked.value), distance)


def _call(words: Words) -> Case:
    offered = tool_cases(words, words.rng.randint(1, 4))
    chosen = words.rng.choice(offered)
    body = _body([{"role": "user", "content": chosen.request}], tools=[case.tool for case in offered])
    return Case("tool", body, (chosen.name, chosen.arguments))


def _schema(words: Words) -> Case:
    groups = [entity_facts(words, words.rng.randint(2, 5)) for _ in range(words.rng.randint(2, 8))]
    asked, schema = json_ask(words, words.rng.choice(groups))
    content = f"{fact_sheet(words, groups)}\n\n{asked.question}"
    form = {"name": "answer", "strict": True, "schema": {**schema, "additionalProperties": False}}
    body = _body([{"role": "user", "content": content}], response_format={"type": "json_schema", "json_schema": form})
    return Case("schema", body, json.loads(asked.answer))
