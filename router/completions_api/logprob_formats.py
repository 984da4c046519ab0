"""Log-probabilities in the formats of completions, chats and prompts."""

from __future__ import annotations

from collections.abc import Sequence

from router.completions_api.response_objects import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from router.generation.prompt_scores import PromptScores
from router.generation.token_logprob import TokenLogprob
from router.text.tokenizer import Tokenizer


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_token_text(tokenizer, token.token_id) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_top_logprobs(tokenizer, token, num_top) for token in tokens] if num_top else None,
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(tokenizer, token, num_top) for token in tokens], None)


def prompt_logprobs(tokenizer: Tokenizer, scores: PromptScores, num_top: int) -> PromptLogprobs:
    """vLLM's format: for each token but the first an object by token id, of its own id and the ``num_top`` best."""
    found: PromptLogprobs = [None]
    for token_id, (own, rank, best) in zip(scores.token_ids[1:], scores.rows(), strict=True):
        entries = {str(token_id): _prompt_logprob(tokenizer, token_id, own, rank)}
        for top_rank, (other, logprob) in enumerate(best[:num_top], 1):
            entries.setdefault(str(other), _prompt_logprob(tokenizer, other, logprob, top_rank))
        found.append(entries)
    return found


def _prompt_logprob(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> PromptLogprob:
    return PromptLogprob(logprob, rank, tokenizer.token_bytes(token_id).decode(errors="replace"))


def _top_logprobs(tokenizer: Tokenizer, token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    best = {_token_text(tokenizer, token_id): logprob for token_id, logprob in token.alternatives[:num_top]}
    best.setdefault(_token_text(tokenizer, token.token_id), token.logprob)
    return best


def _chat_token(tokenizer: Tokenizer, token: TokenLogprob, num_top: int) -> ChatTokenLogprob:
    assert token.logprob is not None, "chats have log-probabilities of output tokens only"
    data = tokenizer.token_bytes(token.token_id)
    top = [_top_logprob(tokenizer, token_id, logprob) for token_id, logprob in token.alternatives[:num_top]]
    return ChatTokenLogprob(data.decode(errors="replace"), token.logprob, list(data), top)


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(data.decode(errors="replace"), logprob, list(data))


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token as a JSON key; a part of a character as OpenAI writes it, ``bytes:\xe6\x97``."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
