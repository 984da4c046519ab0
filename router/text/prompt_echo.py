"""Adds what ``echo`` needs to prompts: their text, and where each token begins in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from router.text.prompt import Prompt
from router.text.tokenizer import Tokenizer

_INLINE_TOKENS = 1024  # of all prompts: a millisecond


async def with_echo(prompts: list[Prompt], scored: bool, special: bool, tokenizer: Tokenizer) -> list[Prompt]:
    """Add texts, and token offsets where ``scored``. ``special``: the texts were encoded with special tokens."""
    if sum(prompt.num_tokens for prompt in prompts) <= _INLINE_TOKENS:
        return [_with_echo(prompt, scored, special, tokenizer) for prompt in prompts]
    return await asyncio.to_thread(lambda: [_with_echo(prompt, scored, special, tokenizer) for prompt in prompts])


def _with_echo(prompt: Prompt, scored: bool, special: bool, tokenizer: Tokenizer) -> Prompt:
    if prompt.text is not None:
        offsets = tokenizer.offsets(prompt.text, special) if scored else ()
        return msgspec.structs.replace(prompt, offsets=offsets)
    token_ids = prompt.unpacked()
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Prompt(prompt.token_ids, text, _offsets(token_ids, tokenizer) if scored else ())


def _offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return where each token begins in the decoded text."""
    decoder, offsets, length = tokenizer.detokenizer(), [], 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(decoder.push(token_id))
    return offsets
