"""The requests of ``pdserve bench``: random prompts, and the bodies of streamed completions."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec


class Request(NamedTuple):
    at: float  # seconds since the start of the load
    prompt: list[int]  # token ids
    num_tokens: int  # output tokens, exactly


def random_prompt(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    """Return random token ids below ``vocabulary`` (--vocab), of the upper half: common special tokens are below it."""
    return rng.choices(range(vocabulary // 2, vocabulary), k=length)


def completion_body(model: str, request: Request, salt: str = "") -> bytes:
    """Return the body of a streamed greedy completion; requests share cached prefixes only under one ``salt``."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # so tokens without text are counted as they arrive
    }
    return msgspec.json.encode(body | ({"cache_salt": salt} if salt else {}))
