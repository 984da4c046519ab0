"""The requests of ``pdserve bench``: random prompts, and the bodies of streamed completions and chats."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father"
)


class Request(NamedTuple):
    at: float  # seconds since the start of the load
    prompt: list[int]  # token ids
    num_tokens: int  # output tokens, exactly
    text: str = ""  # prompt text, if there are no token ids
    images: tuple[str, ...] = ()  # data: URLs before the text, in a chat

    @property
    def size(self) -> int:
        """Tokens of the prompt. A text counts its words, as only the server has the tokenizer."""
        return len(self.prompt or self.text.split())


def random_prompt(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    """Return random token ids below ``vocabulary`` (--vocab), of the upper half: common special tokens are below it."""
    return rng.choices(range(vocabulary // 2, vocabulary), k=length)


def random_text(rng: random.Random, length: int) -> str:
    """Return random words, most of which are one token: chats take no token ids."""
    return " ".join(rng.choices(_WORDS.split(), k=length))


def completion_body(model: str, request: Request, salt: str = "") -> bytes:
    """Return the body of a streamed greedy completion; requests share cached prefixes only under one ``salt``."""
    body = {"model": model, "prompt": request.text or request.prompt} | _common(request)
    return msgspec.json.encode(body | ({"cache_salt": salt} if salt else {}))


def chat_body(model: str, request: Request) -> bytes:
    """Return the body of a streamed greedy chat with one message."""
    content: Any = request.text
    if request.images:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in request.images]
        content = [*parts, {"type": "text", "text": request.text}]
    messages = [{"role": "user", "content": content}]
    return msgspec.json.encode({"model": model, "messages": messages} | _common(request))


def _common(request: Request) -> dict[str, Any]:
    return {
        "max_tokens": request.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # so tokens without text are counted as they arrive
    }
