"""The request bodies of /v1/messages and /v1/messages/count_tokens, and the chat that they become."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.errors import RequestError, shown
from pdserve.sampling_params import BodyParams
from router.completions_api.body_parsing import convert, parse_json
from router.completions_api.generate_body import Defaulted
from router.completions_api.request_bodies import ChatBody, check_chat
from router.messages_api.conversation import chat_messages
from router.messages_api.params import (
    MessageParam,
    MetadataParam,
    OutputConfigParam,
    TextOrImageParam,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
)

# Fields beyond Anthropic's API, which go to the chat unchanged.
EXTENSIONS = frozenset(
    {*BodyParams.__struct_fields__} - {"n"}  # a message has one choice
    | {"min_p", "seed", "repetition_penalty", "logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids"}
    | {"skip_special_tokens", "cache_salt", "priority", "structured_outputs", "chat_template_kwargs", "documents"}
)
NoEffect = Annotated[Any, Meta(description="Accepted without effect.")]
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that make the prompt."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[TextOrImageParam] = ""
    tools: list[ToolParam] = []
    tool_choice: ToolChoiceParam = ToolChoiceParam("auto")
    thinking: ThinkingParam = ThinkingParam("adaptive")  # as the chat template does it
    output_config: OutputConfigParam = OutputConfigParam()
    cache_control: NoEffect = None
    context_management: NoEffect = None
    speed: NoEffect = None


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    max_tokens: Annotated[int, Meta(description="Limit of output tokens, lowered to the room in the context.")]
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: Defaulted[float] = None
    top_p: Defaulted[float] = None
    top_k: Defaulted[int] = None
    metadata: MetadataParam = MetadataParam()
    diagnostics: NoEffect = None
    inference_geo: NoEffect = None
    service_tier: NoEffect = None
    user_profile_id: NoEffect = None
    workspace_id: NoEffect = None


class MessagesBody(ChatBody, kw_only=True, frozen=True):
    """The chat, with the original request."""

    request: MessagesRequest

    @property
    def lowers_max_tokens(self) -> bool:
        return True


def parse_messages(data: bytes) -> MessagesBody:
    """Translate a body of /v1/messages to a chat. Raises RequestError."""
    fields = parse_json(data)
    extensions = {name: fields.pop(name) for name in EXTENSIONS.intersection(fields)}
    request = convert(fields, MessagesRequest)
    sampling = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id,
        "thinking_token_budget": request.thinking.budget_tokens if request.thinking.type == "enabled" else None,
        "include_reasoning": request.thinking.display != "omitted",
        "response_format": _response_format(request.output_config),
    }
    chat = convert({**extensions, **sampling, **_prompt_fields(request, extensions)}, ChatBody)
    body = MessagesBody(request=request, **{name: getattr(chat, name) for name in ChatBody.__struct_fields__})
    check_chat(body)
    return body


def parse_count_tokens(data: bytes) -> ChatBody:
    """Translate a body of /v1/messages/count_tokens to a chat. Raises RequestError."""
    fields = parse_json(data)
    extensions = {name: fields.pop(name) for name in EXTENSIONS.intersection(fields)}
    return convert({**extensions, **_prompt_fields(convert(fields, CountTokensRequest), extensions)}, ChatBody)


def _prompt_fields(request: CountTokensRequest, extensions: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat that make its prompt."""
    messages = chat_messages(request.system, request.messages)
    variables = extensions.get("chat_template_kwargs") or {}
    if request.thinking.type in ("enabled", "disabled") and isinstance(variables, dict):
        enabled = request.thinking.type == "enabled"
        variables = {"enable_thinking": enabled, "thinking": enabled, **variables}  # as Qwen3 and DeepSeek name it
    return {
        "model": request.model,
        "messages": messages,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)],
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": not request.tool_choice.disable_parallel_tool_use,
        "reasoning_effort": request.output_config.effort,
        "chat_template_kwargs": variables,
    }


def _tool(tool: ToolParam, where: str) -> dict[str, Any]:
    """A function in chat form, with a nested ``function`` object."""
    if tool.type not in (None, "custom"):
        raise RequestError(f"{where} has type {shown(tool.type)}; only 'custom' is supported", "tools")
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing", "tools")
    function = {  # in this order, as models have seen it in training
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(tool_choice: ToolChoiceParam) -> str | dict[str, Any]:
    if tool_choice.type == "tool":
        return {"type": "function", "function": {"name": tool_choice.name}}
    return _TOOL_CHOICES[tool_choice.type]


def _response_format(config: OutputConfigParam) -> dict[str, Any]:
    if config.format is None:
        return {}
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.schema}}
