"""The request bodies of /v1/messages and /v1/messages/count_tokens, and the chat that they become."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.errors import RequestError, shown
from pdserve.sampling_params import BodyParams
from router.completions_api.body_parsing import convert, parse_json
from router.completions_api.field_names import field_names, named_as
from router.completions_api.generate_body import Defaulted
from router.completions_api.request_bodies import ChatBody, check_chat
from router.messages_api.conversation import MessagesChat, newest_turn, read_messages
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
#: Fields of a chat, and their names here.
FIELD_NAMES = field_names(
    (r"\.function\.parameters\b", ".input_schema"),
    (r"\.function\b", ""),
    (r"\bmax_completion_tokens\b", "max_tokens"),
    (r"\bresponse_format\b", "output_config.format"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\bthinking_token_budget\b", "thinking.budget_tokens"),
    (r"^stop$", "stop_sequences"),
)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that make the prompt."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[TextOrImageParam] = ""
    tools: list[ToolParam] = []
    tool_choice: ToolChoiceParam = ToolChoiceParam("auto")
    thinking: ThinkingParam = ThinkingParam("adaptive")  # the chat template decides
    output_config: OutputConfigParam = OutputConfigParam()
    mcp_servers: Annotated[list[Any], Meta(description="Left out: their tools run at Anthropic.")] = []
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
    warnings: list[str]  # parts of the request that the model does not get

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
    conversation = read_messages(request.system, request.messages, newest_turn(request.messages))
    with named_as(FIELD_NAMES):
        chat = convert({**extensions, **sampling, **_prompt_fields(request, conversation, extensions)}, ChatBody)
        chat_fields = {name: getattr(chat, name) for name in ChatBody.__struct_fields__}
        body = MessagesBody(request=request, warnings=_warnings(request, conversation), **chat_fields)
        check_chat(body)
    return body


def parse_count_tokens(data: bytes) -> ChatBody:
    """Translate a body of /v1/messages/count_tokens to a chat. Raises RequestError."""
    fields = parse_json(data)
    extensions = {name: fields.pop(name) for name in EXTENSIONS.intersection(fields)}
    request = convert(fields, CountTokensRequest)
    conversation = read_messages(request.system, request.messages)
    with named_as(FIELD_NAMES):
        return convert({**extensions, **_prompt_fields(request, conversation, extensions)}, ChatBody)


def _prompt_fields(
    request: CountTokensRequest, conversation: MessagesChat, extensions: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a chat that make its prompt."""
    messages = conversation.joined()
    given = extensions.get("chat_template_kwargs")
    variables = {} if given is None else given
    if request.thinking.type in ("enabled", "disabled") and isinstance(variables, dict):
        enabled = request.thinking.type == "enabled"
        variables = {"enable_thinking": enabled, "thinking": enabled, **variables}  # names of Qwen3 and DeepSeek
    tools = enumerate(request.tools)
    return {
        "model": request.model,
        "messages": messages,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in tools if not tool.of_anthropic],
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": not request.tool_choice.disable_parallel_tool_use,
        "reasoning_effort": request.output_config.effort,
        "chat_template_kwargs": variables,
    }


def _warnings(request: CountTokensRequest, conversation: MessagesChat) -> list[str]:
    kinds = dict.fromkeys(str(tool.type) for tool in request.tools if tool.of_anthropic)
    warnings = [f"tools of type {shown(kind)} are left out: only 'custom' is supported" for kind in kinds]
    if request.mcp_servers:
        warnings.append("mcp_servers are left out: their tools run at Anthropic")
    if conversation.num_documents:
        number = conversation.num_documents
        warnings.append(f"the model reads text only: {number} blocks of type 'document' are placeholders")
    return warnings


def _tool(tool: ToolParam, where: str) -> dict[str, Any]:
    """A function in chat form, with a nested ``function`` object."""
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing", "tools")
    function = {  # the order of fields in training data
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(request: CountTokensRequest) -> str | dict[str, Any]:
    """Raises RequestError for a tool that is left out."""
    choice = request.tool_choice
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type]
    if any(tool.of_anthropic and tool.name == choice.name for tool in request.tools):
        text = f"tool_choice names {shown(choice.name)}, which does not run here; use 'auto'"
        raise RequestError(text, "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(config: OutputConfigParam) -> dict[str, Any]:
    if config.format is None:
        return {}
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.schema}}
