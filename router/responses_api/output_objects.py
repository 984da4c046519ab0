"""The objects of /v1/responses, for encoding and for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from router.completions_api.response_objects import ChatTokenLogprob, CompletionTokensDetails
from router.generation.usage import Usage


class OutputText(Struct, tag="output_text"):
    text: str
    annotations: list[None]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Struct, tag="message"):
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class ReasoningItem(Struct, tag="reasoning"):
    id: str
    summary: list[None]
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, 0),
            usage.completion_tokens,
            CompletionTokensDetails(usage.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class ResponseObject(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    background: Literal[False]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    completed_at: int | UnsetType = UNSET
