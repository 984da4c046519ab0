"""The shapes of what the router answers, for the OpenAPI document. Fields that are not always there are unset.

The formats that write these objects are free of such types, because they write one per token; a test holds both
together (tests/router/test_openapi.py).
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorFields(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    error: ErrorFields


# ---------------------------------------------------------------- completions and chats


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class UsageAnswer(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TokenLogprobAnswer(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprobAnswer):
    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Struct):
    name: str
    arguments: str


class ToolCallAnswer(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


# ---------------------------------------------------------------- /v1/responses


class OutputTextPart(Struct):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatTokenLogprob]


class ReasoningPart(Struct):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Struct, tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextPart]


class ReasoningItem(Struct, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[None]
    content: list[ReasoningPart]


class FunctionCallItem(Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class ItemsUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ItemsAnswer(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int
    status: Literal["completed", "incomplete"]
    model: str
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    usage: ItemsUsage
    store: Literal[False]
    tools: list[dict[str, Any]]


# ---------------------------------------------------------------- the small ones


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct):
    prompt: str


class HealthAnswer(Struct):
    status: Literal["ok"]


class VersionAnswer(Struct):
    version: str
