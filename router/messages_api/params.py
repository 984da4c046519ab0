"""The parts of a request of /v1/messages, under the names of Anthropic's SDK.

Unknown fields of these parts have no effect: ``cache_control``, ``citations`` and their like.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class TextBlockParam(Struct, tag="text", frozen=True):
    text: str


class ThinkingBlockParam(Struct, tag="thinking", frozen=True):
    thinking: str


class RedactedThinkingBlockParam(Struct, tag="redacted_thinking", frozen=True):
    """Accepted without effect: only Anthropic can read it."""


class ToolUseBlockParam(Struct, tag="tool_use", frozen=True):
    id: str
    name: str
    input: dict[str, Any]


class ImageBlockParam(Struct, tag="image", frozen=True):
    """``source`` has type ``base64``, with ``data``. A model that reads text only gets a placeholder."""

    source: dict[str, Any] = {}


class DocumentBlockParam(Struct, tag="document", frozen=True):
    """The model reads plain text (``source`` of type ``text`` with ``data``), and a placeholder for others."""

    source: dict[str, Any]


TextOrImageParam = TextBlockParam | ImageBlockParam  # msgspec requires the type in unions only


class SearchResultBlockParam(Struct, tag="search_result", frozen=True):
    title: str
    source: str
    content: list[TextOrImageParam]


class ToolReferenceBlockParam(Struct, tag="tool_reference", frozen=True):
    """A tool that a search has found. All tools of a request are in its prompt."""

    tool_name: str


TextualBlockParam = (
    TextBlockParam | ImageBlockParam | DocumentBlockParam | SearchResultBlockParam | ToolReferenceBlockParam
)


class ToolResultBlockParam(Struct, tag="tool_result", frozen=True):
    tool_use_id: str
    content: str | list[TextualBlockParam] | None = None


ContentBlockParam = (
    TextBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
    | ImageBlockParam
    | DocumentBlockParam
    | SearchResultBlockParam
)


class MessageParam(Struct, frozen=True):
    """``system`` is an instruction in the middle of a conversation, as Claude Code sends it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlockParam]


class ToolParam(Struct, frozen=True):
    name: str
    input_schema: dict[str, Any] | None = None  # tools of Anthropic's own have none; they are left out
    description: str | None = None
    strict: bool | None = None
    type: str | None = None

    @property
    def of_anthropic(self) -> bool:
        """Whether the tool is one that Anthropic defines, such as web search."""
        return self.type not in (None, "custom")


class ToolChoiceParam(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class ThinkingParam(Struct, frozen=True):
    """``between_tools`` and ``adaptive`` leave reasoning to the model. ``budget_tokens`` counts where it is enabled."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormatParam(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfigParam(Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatParam | None = None


class MetadataParam(Struct, frozen=True):
    user_id: str | None = None
