"""A conversation of /v1/messages as messages of a chat.

user:       text          ──► user            consecutive ones become one message
            tool_result   ──► tool            one message each, before the text that follows it
assistant:  text, thinking, tool_use ──► one assistant message
system:     at the beginning ──► system; later ──► the end of the user's message or tool result before it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pdserve.errors import RequestError, shown
from router.messages_api.params import (
    ContentBlockParam,
    DocumentBlockParam,
    ImageBlockParam,
    MessageParam,
    RedactedThinkingBlockParam,
    SearchResultBlockParam,
    TextBlockParam,
    TextOrImageParam,
    TextualBlockParam,
    ThinkingBlockParam,
    ToolReferenceBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)

Message = dict[str, Any]
Block = TypeVar("Block")

_TEXTS = ("content", "reasoning")
_BETWEEN = "\n"  # texts of neighbouring blocks
# Claude Code begins its system prompt with a line that has a hash of the request, so no two requests share a prefix.
_REQUEST_HASH = "x-anthropic-billing-header:"


def chat_messages(system: str | Sequence[TextOrImageParam], messages: Sequence[MessageParam]) -> list[Message]:
    """Convert a conversation. Raises RequestError for blocks that are no text, and for an open tool_use at the end."""
    chat = _Chat()
    chat.add_system(system, "system")
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        match message.role:
            case "system":
                chat.add_system(message.content, where)
            case "user":
                chat.add_user(message.content, where)
            case "assistant":
                chat.add_assistant(message.content, where)
    if not messages or not chat.messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    if chat.has_open_calls:
        raise RequestError("the last message has a tool_use; add a message with its tool_result", "messages")
    found = chat.joined()
    if found[-1]["role"] == "assistant" and not found[-1].get("content"):
        raise RequestError("the last message has no text to continue; end with a message of the user", "messages")
    return found


class _Chat:
    """``messages`` have lists of texts as content and reasoning, so that many blocks are joined once."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._held: list[str] = []  # system texts between a tool_use and its tool_result

    def joined(self) -> list[Message]:
        return [
            {name: _BETWEEN.join(value) if name in _TEXTS else value for name, value in message.items()}
            for message in self.messages
        ]

    @property
    def has_open_calls(self) -> bool:
        """Whether results of the last message's calls must follow."""
        return bool(self.messages) and "tool_calls" in self.messages[-1]

    def add_system(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        """Add a text where it changes no earlier part of the prompt, so that the cached prefix stays valid."""
        texts = (_without_hash(_text(block, at)) for block, at in _blocks(content, where))
        self._add_instructions(_BETWEEN.join(text for text in texts if text))

    def _add_instructions(self, text: str) -> None:
        if not text:
            return
        if self.has_open_calls:
            self._held.append(text)
        elif not self.messages:
            self._last("system")["content"] = [text]
        elif self.messages[-1]["role"] == "assistant":
            self._last("user")["content"] = [text]
        else:  # after tool results, too: some templates drop the reasoning before the last user message
            self.messages[-1]["content"].append(text)

    def add_user(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        for block, at in _blocks(content, where):
            if isinstance(block, ToolResultBlockParam):
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": [_result(block, at)]}
                self.messages.append(result)
            else:
                self._last("user").setdefault("content", []).append(_text(block, at))
        held, self._held = self._held, []
        self._add_instructions(_BETWEEN.join(held))

    def add_assistant(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        message = self._last("assistant")
        for block, at in _blocks(content, where):
            match block:
                case ThinkingBlockParam():
                    message.setdefault("reasoning", []).append(block.thinking)
                case RedactedThinkingBlockParam():
                    pass
                case ToolUseBlockParam():
                    function = {"name": block.name, "arguments": block.input}
                    call = {"id": block.id, "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
                case _:
                    message.setdefault("content", []).append(_text(block, at))
        if "tool_calls" not in message:
            message.setdefault("content", [])  # templates expect either

    def _last(self, role: str) -> Message:
        """Return the last message if it has the role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role})
        return self.messages[-1]


def _blocks(content: str | Sequence[Block], where: str) -> Iterator[tuple[Block | TextBlockParam, str]]:
    """Yield the blocks of a content and where each one is."""
    if isinstance(content, str):
        yield TextBlockParam(content), where
    elif not content:
        yield TextBlockParam(""), where
    else:
        yield from ((block, f"{where}[{index}]") for index, block in enumerate(content))


def _without_hash(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_REQUEST_HASH) else text


def _result(block: ToolResultBlockParam, where: str) -> str:
    return _BETWEEN.join(_text(part, at) for part, at in _blocks(block.content or "", f"{where}.content"))


def _text(block: ContentBlockParam | TextualBlockParam, where: str) -> str:
    match block:
        case TextBlockParam():
            return block.text
        case SearchResultBlockParam():
            parts = (_text(part, at) for part, at in _blocks(block.content, f"{where}.content"))
            return _BETWEEN.join([block.title, block.source, *parts])
        case ToolReferenceBlockParam():
            return block.tool_name
        case DocumentBlockParam(source={"type": "text", "data": str() as data}):
            return data
        case DocumentBlockParam():
            kind = shown(block.source.get("type"))
            raise RequestError(f"{where} is a document of type {kind}; only 'text' is supported", "messages")
        case ImageBlockParam():
            raise RequestError(f"{where} is an image; images are not supported, leave it out", "messages")
        case _:
            tag = type(block).__struct_config__.tag
            raise RequestError(f"{where} has type {tag!r}, which its role may not have; use 'text'", "messages")
