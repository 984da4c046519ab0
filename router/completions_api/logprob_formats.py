"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.generation.prompt_scores import PromptScores
from router.generation.token_logprob import TokenLogprob
from router.text.tokenizer import Tokenizer


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


def prompt_logprobs(tokenizer: Tokenizer, scores: PromptScores, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's format: for each token an object of its own id and the ``num_top`` best ids."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, (own, rank, best) in zip(scores.token_ids[1:], scores.rows(), strict=True):
        entries = {str(token_id): _prompt_token(tokenizer, token_id, own, rank)}
        for top_rank, (other, logprob) in enumerate(best[:num_top], 1):
            entries.setdefault(str(other), _prompt_token(tokenizer, other, logprob, top_rank))
        found.append(entries)
    return found


def _prompt_token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id).decode(errors="replace")
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


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
