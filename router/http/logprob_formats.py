"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.pb import pdserve_pb2 as pb
from router.text.tokenizer import Tokenizer

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


class TokenLogprob:
    """One token: its id, where its text begins (in characters), its log-probability and the best alternatives.

    The first token of a prompt has no log-probability.
    """

    __slots__ = ("alternatives", "logprob", "offset", "token_id")

    def __init__(
        self, token_id: int, offset: int, logprob: float | None, alternatives: Sequence[tuple[int, float]]
    ) -> None:
        self.token_id = token_id
        self.offset = offset
        self.logprob = logprob
        self.alternatives = alternatives

    @classmethod
    def of_output(cls, output: pb.Output, offset: int) -> TokenLogprob:
        found = output.logprobs
        alternatives = [
            (token_id, max(logprob, LOWEST))
            for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        ]
        return cls(output.token_id, offset, max(found.logprob, LOWEST), alternatives)


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


def _top(tokenizer: Tokenizer, token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    best = {_text(tokenizer, token_id): logprob for token_id, logprob in token.alternatives[:num_top]}
    best.setdefault(_text(tokenizer, token.token_id), token.logprob)
    return best


def _chat_token(tokenizer: Tokenizer, token: TokenLogprob, num_top: int) -> dict[str, Any]:
    top = [_entry(tokenizer, token_id, logprob) for token_id, logprob in token.alternatives[:num_top]]
    assert token.logprob is not None, "a chat tells of output tokens only"
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
