"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.pb import pdserve_pb2 as pb
from router.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


class TokenLogprob:
    """One output token: its id, where its text begins, its log-probability and the best alternatives."""

    __slots__ = ("alternatives", "logprob", "offset", "token_id")

    def __init__(self, output: pb.Output, offset: int) -> None:
        found = output.logprobs
        self.token_id = output.token_id
        self.offset = offset  # characters
        self.logprob = max(found.logprob, _LOWEST)
        self.alternatives = [
            (token_id, max(logprob, _LOWEST))
            for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        ]


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """The legacy format: parallel lists; ``top_logprobs`` holds the sampled token, too."""
    return {
        "tokens": [_text(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(tokenizer, token, num_top) for token in tokens] if num_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """The chat format: one object per token, with its bytes."""
    return {"content": [_chat_token(tokenizer, token, num_top) for token in tokens], "refusal": None}


def _top(tokenizer: Tokenizer, token: TokenLogprob, num_top: int) -> dict[str, float]:
    best = {_text(tokenizer, token_id): logprob for token_id, logprob in token.alternatives[:num_top]}
    best.setdefault(_text(tokenizer, token.token_id), token.logprob)
    return best


def _chat_token(tokenizer: Tokenizer, token: TokenLogprob, num_top: int) -> dict[str, Any]:
    top = [_entry(tokenizer, token_id, logprob) for token_id, logprob in token.alternatives[:num_top]]
    return {**_entry(tokenizer, token.token_id, token.logprob), "top_logprobs": top}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token as a key: text, or as OpenAI writes a part of a character, ``bytes:\xe6\x97``."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
