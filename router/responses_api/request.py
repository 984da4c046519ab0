"""The request body of /v1/responses and the chat it becomes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdserve.errors import RequestError, shown
from router.completions_api.body_parsing import convert, parse_json
from router.completions_api.field_names import field_names, named_as
from router.completions_api.request_bodies import ChatBody, check_chat
from router.responses_api.compaction import PROMPT
from router.responses_api.input_items import InputChat, Item, input_chat, input_items, reference_of
from router.responses_api.tool_forms import OfferedTools, chat_tool_choice, offered_tools

LOGPROBS = "message.output_text.logprobs"
# Without effect: reasoning is never encrypted, and the tools of the others do not run here.
_NO_EFFECT: tuple[str, ...] = (
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
)
_NO_EFFECT += ("file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url")
_INCLUDES = (LOGPROBS, "message.input_image.image_url", *_NO_EFFECT)
#: Fields of a chat, and their names here.
FIELD_NAMES = field_names(
    (r"\.function\b", ""),
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\bresponse_format\b", "text.format"),
    (r"\breasoning_effort\b", "reasoning.effort"),
)


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None  # accepted without effect: reasoning is sent in full
    generate_summary: str | None = None


class Text(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of this endpoint; other fields are those of a chat."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    reasoning: Reasoning = Reasoning()
    text: Text = Text()
    include: list[str] = []
    metadata: dict[str, str] = {}
    store: bool = True  # false in effect without --response-store
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"  # both refuse an input that does not fit
    max_tool_calls: int | None = None  # without effect: it limits built-in tools, which do not exist here
    safety_identifier: str | None = None  # without effect, like the next two fields
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @property
    def needs_store(self) -> bool:
        """Whether the input names stored responses or items."""
        references = any(reference_of(item) is not None for item in input_items(self.input))
        return self.previous_response_id is not None or references


class CompactRequest(msgspec.Struct, kw_only=True, frozen=True):
    model: str
    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str = ""
    priority: int = 0


_MIN_SUMMARY = 4  # tokens; a small model may end at once

# Chat fields that this endpoint spells differently, or does not have.
CHAT_ONLY = frozenset(
    {*("messages", "max_tokens", "max_completion_tokens", "logprobs", "response_format", "reasoning_effort", "n")}
    | {*("prompt_logprobs", "return_token_ids", "include_reasoning", "continue_final_message")}
    | {*("add_generation_prompt", "echo", "separate_reasoning", "stream_reasoning", "return_tokens_as_token_ids")}
)


class ResponsesBody(ChatBody, kw_only=True, frozen=True, weakref=True):
    """The chat, with the original request. ``messages`` is empty until the items that the input names are read."""

    request: ResponsesRequest
    items: list[Item]  # the whole conversation
    keep_images: bool = False  # the items are stored with their images
    offered: OfferedTools
    prompt_field = "input"
    limit_field = "max_output_tokens"

    @property
    def warnings(self) -> list[str]:
        """The tools of the request that the model does not get."""
        return self.offered.warnings

    def with_items(self, items: list[Item]) -> ResponsesBody:
        """Return this body with the whole conversation. Raises RequestError."""
        chat = input_chat(items, self.request.instructions, self.keep_images)
        return msgspec.structs.replace(self, items=items, messages=chat.joined())


def parse_responses(data: bytes, has_store: bool) -> ResponsesBody:
    """Raises RequestError."""
    fields = parse_json(data)
    return responses_body(fields, keep_images=has_store and fields.get("store") is not False)


def parse_compact(data: bytes) -> ResponsesBody:
    """Return a body that asks for a summary of the conversation. Raises RequestError."""
    request = convert(parse_json(data), CompactRequest)
    items = input_items(request.input)
    if not items and request.previous_response_id is None:
        raise RequestError("input is empty; give the conversation, or previous_response_id", "input")
    asked = [*items, {"role": "user", "content": PROMPT}]
    fields = {**msgspec.structs.asdict(request), "input": asked, "store": False, "min_tokens": _MIN_SUMMARY}
    return responses_body(fields)


def responses_body(fields: dict[str, Any], keep_images: bool = False) -> ResponsesBody:
    """Raises RequestError."""
    wrong = next((name for name in fields if name in CHAT_ONLY), None)
    if wrong is not None:
        remedy = "send the request there" if wrong == "messages" else "leave it out"
        raise RequestError(f"{wrong} is a parameter of /v1/chat/completions; {remedy}", wrong, "unknown_parameter")
    own = {name: value for name, value in fields.items() if name in ResponsesRequest.__struct_fields__}
    request = convert(own, ResponsesRequest)
    _check(request)
    rest = {name: value for name, value in fields.items() if name not in own}
    items = input_items(request.input)
    offered = offered_tools(request.tools)
    conversation = InputChat() if request.needs_store else input_chat(items, request.instructions, keep_images)
    with named_as(FIELD_NAMES):
        chat = convert({**rest, **_as_chat(request, conversation, offered)}, ChatBody)
        chat_fields = {name: getattr(chat, name) for name in ChatBody.__struct_fields__}
        body = ResponsesBody(request=request, items=items, offered=offered, keep_images=keep_images, **chat_fields)
        check_chat(body)
    return body


def _check(request: ResponsesRequest) -> None:
    unsupported = {"conversation": "send the conversation as input", "prompt": "send input and instructions"}
    for name, remedy in unsupported.items():
        if getattr(request, name) is not None:
            raise RequestError(f"{name} is not supported; {remedy}", name, "unsupported_parameter")
    unknown = next((name for name in request.include if name not in _INCLUDES), None)
    if unknown is not None:
        raise RequestError(f"include {shown(unknown)} is not supported; use {LOGPROBS!r}", "include")
    if request.background and not request.store:
        raise RequestError("background needs store to be true; the response is read from the store", "background")


def _as_chat(request: ResponsesRequest, conversation: InputChat, offered: OfferedTools) -> dict[str, Any]:
    return {
        "messages": conversation.joined(),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": LOGPROBS in request.include or request.top_logprobs > 0,
        "top_logprobs": request.top_logprobs or None,
        "tools": offered.functions,
        "tool_choice": chat_tool_choice(request.tool_choice, offered.left_out),
        "reasoning_effort": request.reasoning.effort,
        "response_format": _response_format(request.text.format or {}),
    }


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
