"""Random requests that use all of the API: lengths at edges, sampling, rules, grammars, log-probabilities.

A request always has a seed, so its answer depends on nothing but the request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from answers import Answer
from fleet import MODEL_NAME

TOKENIZER_TOKENS = 4096  # tokens of the embedded tokenizer; a larger vocabulary has tokens without text
WORDS = ("the", "a", " and", "e", " of", "ing", "\n", " the", "é", " river", "s")
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "[a-z ]{5,60}"}},
    {"guided_regex": r"(\d{1,3}\.){3}\d{1,3}"},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9}}},
    {"guided_choice": ["river", "bridge", "river bank", "é"]},
    {"guided_grammar": 'start: "(" item ("," item)* ")"\nitem: /[a-z]+/ | /[0-9]+/'},
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "place",
                "schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["s", "m", "l"]}},
                    "required": ["name", "size"],
                    "additionalProperties": False,
                },
            },
        }
    },
)


def new_prompt(rng: random.Random, edges: Sequence[int], longest: int) -> list[int]:
    """Return a prompt whose length is often a multiple of a number of ``edges``, or one token off."""
    length = rng.randint(1, longest)
    if rng.random() < 0.7:
        edge = rng.choice(edges)
        length = edge * rng.randint(1, max(1, longest // edge)) + rng.choice((-1, 0, 1))
    length = min(max(length, 1), longest)
    if rng.random() < 0.2:  # penalties and prefix caches see the same tokens again
        return (rng.choices(range(3, TOKENIZER_TOKENS), k=7) * length)[:length]
    return rng.choices(range(3, TOKENIZER_TOKENS), k=length)


def new_request(
    rng: random.Random, edges: Sequence[int], longest: int, max_tokens: int, vocabulary: int
) -> dict[str, Any]:
    """Return a random body for /v1/completions."""
    two = rng.random() < 0.1
    prompt = [new_prompt(rng, edges, longest) for _ in range(2)] if two else new_prompt(rng, edges, longest)
    return {"model": MODEL_NAME, "prompt": prompt, **_fields(rng, max_tokens, vocabulary)}


def new_chat(
    rng: random.Random, messages: list[dict[str, Any]], max_tokens: int, vocabulary: int, *, prompt_logprobs: bool
) -> dict[str, Any]:
    """Return a random body for /v1/chat/completions. ``prompt_logprobs``: some bodies request them."""
    fields = _fields(rng, max_tokens, vocabulary)
    for name in ("echo", "truncate_prompt_tokens", *(() if prompt_logprobs else ("prompt_logprobs",))):
        fields.pop(name, None)
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return {"model": MODEL_NAME, "messages": messages, **fields}


def _fields(rng: random.Random, max_tokens: int, vocabulary: int) -> dict[str, Any]:
    """Return the fields of a body beside its prompt."""
    body: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, rng.randint(1, max_tokens), max_tokens)),
        "seed": rng.getrandbits(60),
        "temperature": 0.0,
        "n": rng.choice((1, 1, 1, 2, 3)),
        "stream": rng.random() < 0.6,
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.6:
        body |= _sampling(rng)
    for draw in (_penalties, _bias, _rules, _grammar, _logprobs, _ends, _text):
        if rng.random() < 0.3:
            body |= draw(rng, body, vocabulary)
    return body


def add_stops(rng: random.Random, body: dict[str, Any], answer: Answer) -> bool:
    """Have some requests stop at text or a token of their answer; return whether this one does."""
    choice = answer.choices[0]
    if rng.random() < 0.25 and len(choice.text) > 3:
        at = rng.randrange(len(choice.text) - 2)
        body["stop"] = [choice.text[at : at + rng.randint(1, 5)], "never in an answer"]
        body["include_stop_str_in_output"] = rng.random() < 0.3
        return True
    if rng.random() < 0.15 and choice.token_ids:
        body["stop_token_ids"] = [rng.choice(choice.token_ids)]
        return True
    return False


def _sampling(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": rng.choice((0.3, 0.8, 1.0, 1.6))}
    for name, values in (("top_p", (0.2, 0.9, 0.99)), ("top_k", (1, 5, 50)), ("min_p", (0.02, 0.3))):
        if rng.random() < 0.35:
            fields[name] = rng.choice(values)
    return fields


def _penalties(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    values = {"presence_penalty": (0.7, -0.4), "frequency_penalty": (0.2, 1.3), "repetition_penalty": (1.2, 0.8)}
    return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.6}


def _bias(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    ids = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 20))] + [vocabulary - 1, 2]
    return {"logit_bias": {str(token): rng.choice((-100, -3.5, 2.0, 6.0)) for token in ids}}


def _rules(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if rng.random() < 0.7:
        fields["bad_words"] = rng.sample(WORDS, rng.randint(1, 4))
    if rng.random() < 0.5:
        ids = rng.sample(range(3, vocabulary), min(rng.choice((4, 40, 2000)), vocabulary - 3))
        fields["allowed_token_ids"] = [*ids, vocabulary - 1]
    return fields


def _grammar(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    return rng.choice(GRAMMARS)


def _logprobs(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"logprobs": rng.choice((0, 1, 5, 20))}
    if rng.random() < 0.2:
        fields["logprob_token_ids"] = [3, min(700, vocabulary - 2), vocabulary - 1]
    if rng.random() < 0.3:
        fields["echo"] = True
    if rng.random() < 0.3 and not body["stream"]:
        fields["prompt_logprobs"] = rng.choice((0, 3))
    return fields


def _ends(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    return {"min_tokens": rng.randint(1, body["max_tokens"])}


def _text(rng: random.Random, body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    return {
        "skip_special_tokens": rng.random() < 0.5,
        "return_tokens_as_token_ids": rng.random() < 0.5,
        **({"truncate_prompt_tokens": rng.randint(1, 40)} if rng.random() < 0.4 else {}),
    }
