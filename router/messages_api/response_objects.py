"""The response object of /v1/messages, for encoding and for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from router.generation.usage import Usage


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """The tokens of the prompt are the sum of the three input fields."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens=0,  # prefixes are cached without a request for it
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        )


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Message(Struct, tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: list[str] | UnsetType = UNSET  # parts of the request that the model did not get


class MessageTokensCount(Struct):
    input_tokens: int
