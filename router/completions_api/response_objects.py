"""OpenAI's response objects of completions and chats, for encoding and for the OpenAPI document; their logprobs.

Streams do not use the outer objects: response_encoders.py assembles chunks from pre-encoded bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, Protocol

from msgspec import UNSET, Struct, UnsetType

from router.dialect.json_pieces import lazy_list, parts
from router.generation.logprob_table import LogprobTable, all_batches
from router.generation.prompt_scores import PromptScores
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage


class PromptTokensDetails(Struct):
    cached_tokens: int
    image_tokens: int | UnsetType = UNSET  # absent without images


class CompletionTokensDetails(Struct):
    """The last two are drafts of speculative decoding; absent without any."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> CompletionTokensDetails:
        details = cls(usage.reasoning_tokens)
        if usage.accepted_drafts or usage.rejected_drafts:
            details.accepted_prediction_tokens = usage.accepted_drafts
            details.rejected_prediction_tokens = usage.rejected_drafts
        return details


class UsageInfo(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> UsageInfo:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(usage.cached_tokens, usage.image_tokens or UNSET),
            completion_tokens_details=CompletionTokensDetails.of(usage)
            if usage.reasoning_tokens or usage.accepted_drafts or usage.rejected_drafts
            else UNSET,
        )


class CompletionLogprobs(Struct):
    """The legacy format: parallel lists; ``top_logprobs`` include the sampled token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's extension."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


StopReason = str | int | None  # the stop string, or token, that ended a choice


class CompletionChoice(Struct):
    index: int
    finish_reason: Literal["stop", "length"]
    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: StopReason  # vLLM's extension; None for EOS
    matched_stop: StopReason  # SGLang's extension
    token_ids: list[int] | None  # vLLM's, as the next two
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str | None  # version of the weights; None: unknown
    object: Literal["text_completion"]
    usage: UsageInfo
    choices: list[CompletionChoice]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ChatMessage
    logprobs: ChatLogprobs | None
    stop_reason: StopReason
    matched_stop: StopReason
    token_ids: list[int] | None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str | None  # version of the weights; None: unknown
    object: Literal["chat.completion"]
    usage: UsageInfo
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    warnings: list[str] | UnsetType = UNSET  # parts of the request without effect


class TokenBytes(Protocol):
    """A Tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenNames(Struct, frozen=True):
    """Names of tokens in log-probabilities: their texts, or ids with ``as_ids`` (vLLM's return_tokens_as_token_ids)."""

    tokenizer: TokenBytes
    as_ids: bool = False

    def name(self, token_id: int) -> bytes:
        return b"token_id:%d" % token_id if self.as_ids else self.tokenizer.token_bytes(token_id)


def completion_logprobs(names: TokenNames, tokens: Sequence[TokenLogprob], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_token_text(names, token.token_id) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_top_logprobs(names, token, num_top) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(names: TokenNames, tokens: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(names, token, num_top) for token in tokens], None)


def lazy_completion_logprobs(names: TokenNames, tables: Sequence[LogprobTable], num_top: int) -> CompletionLogprobs:
    """``completion_logprobs`` of all tables, in lazy lists."""
    text = partial(_token_text, names)
    top = partial(_top_logprobs, names, num_top=num_top)
    return CompletionLogprobs(
        tokens=lazy_list(lambda: (list(map(text, part)) for table in tables for part in parts(table.token_ids))),
        token_logprobs=lazy_list(lambda: (list(part) for table in tables for part in parts(table.logprobs))),
        top_logprobs=lazy_list(lambda: (list(map(top, batch)) for batch in all_batches(tables))),
        text_offset=lazy_list(lambda: (list(part) for table in tables for part in parts(table.offsets))),
    )


def lazy_chat_logprobs(names: TokenNames, tables: Sequence[LogprobTable], num_top: int) -> ChatLogprobs:
    """``chat_logprobs`` of all tables, in a lazy list."""
    token = partial(_chat_token, names, num_top=num_top)
    return ChatLogprobs(lazy_list(lambda: (list(map(token, batch)) for batch in all_batches(tables))), None)


def prompt_logprobs(names: TokenNames, scores: PromptScores, num_top: int) -> PromptLogprobs:
    """vLLM's format: for each token but the first an object by token id, of its own id and the ``num_top`` best."""

    def entries() -> Iterator[PromptLogprobs]:
        yield [None]
        for token_id, (own, rank, best) in zip(scores.token_ids[1:], scores.rows(), strict=True):
            entry = {str(token_id): _prompt_logprob(names, token_id, own, rank=rank)}
            for top_rank, (other, logprob) in enumerate(best[:num_top], 1):
                entry.setdefault(str(other), _prompt_logprob(names, other, logprob, rank=top_rank))
            yield [entry]

    return lazy_list(entries)


def _prompt_logprob(names: TokenNames, token_id: int, logprob: float, rank: int) -> PromptLogprob:
    return PromptLogprob(logprob, rank, names.name(token_id).decode(errors="replace"))


def _top_logprobs(names: TokenNames, token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    """Return the token first, as vLLM does, then the best ones."""
    if token.logprob is None:
        return None
    logprobs = {_token_text(names, token.token_id): token.logprob}
    return logprobs | {_token_text(names, token_id): logprob for token_id, logprob in token.alternatives[:num_top]}


def _chat_token(names: TokenNames, token: TokenLogprob, num_top: int) -> ChatTokenLogprob:
    assert token.logprob is not None, "chats have log-probabilities of output tokens only"

    def top_logprob(token_id: int, logprob: float) -> TopLogprob:
        data = names.tokenizer.token_bytes(token_id)
        name = names.name(token_id) if names.as_ids else data
        return TopLogprob(token=name.decode(errors="replace"), logprob=logprob, bytes=list(data))

    own = top_logprob(token.token_id, token.logprob)
    top = [top_logprob(token_id, logprob) for token_id, logprob in token.alternatives[:num_top]]
    return ChatTokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _token_text(names: TokenNames, token_id: int) -> str:
    r"""A token as a JSON key; a part of a character as OpenAI writes it, ``bytes:\xe6\x97``."""
    data = names.name(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
