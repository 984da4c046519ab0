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
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class LocalShellCallItem(Struct, tag="local_shell_call"):
    id: str
    call_id: str
    action: dict[str, Any]
    status: ItemStatus


CallItem = FunctionCallItem | CustomToolCallItem | LocalShellCallItem
OutputItem = OutputMessage | ReasoningItem | CallItem


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
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=CompletionTokensDetails.of(usage),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class ReasoningConfig(Struct):
    effort: str | None
    summary: str | None


class TextConfig(Struct):
    format: dict[str, Any]
    verbosity: str


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(Struct, tag_field="object", tag="response"):
    id: str
    created_at: int
    status: ResponseStatus
    completed_at: int | None
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: None
    prompt: None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]  # tools offered to the model
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    warnings: list[str] | UnsetType = UNSET  # parts of the request that the model did not get


class CompactionItem(Struct, tag="compaction"):
    id: str
    encrypted_content: str


class CompactedResponse(Struct, tag_field="object", tag="response.compaction"):
    id: str
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage


class DeletedResponse(Struct, tag_field="object", tag="response"):
    id: str
    deleted: Literal[True]


class InputItemList(Struct, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
