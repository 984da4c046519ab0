"""OpenAI's response objects of completions and chats, for encoding and for the OpenAPI document.

Streams do not use the outer objects: response_encoders.py assembles chunks from pre-encoded bytes.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from router.generation.usage import Usage


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class UsageInfo(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> UsageInfo:
        reasoning = CompletionTokensDetails(usage.reasoning_tokens) if usage.reasoning_tokens else UNSET
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(usage.cached_tokens), reasoning)


class CompletionLogprobs(Struct):
    """The legacy format: parallel lists; ``top_logprobs`` include the sampled token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's extension."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
    index: int
    finish_reason: Literal["stop", "length"]
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    id: str
    created: int
    model: str
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
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ChatMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    object: Literal["chat.completion"]
    usage: UsageInfo
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
