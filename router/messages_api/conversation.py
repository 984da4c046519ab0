"""A conversation of /v1/messages as messages of a chat.

user:       text          ──► user            consecutive ones become one message
            tool_result   ──► tool            one message each, before the text that follows it
assistant:  text, thinking, tool_use ──► one assistant message
system:     at the beginning ──► system; later ──► the end of the user's message or tool result before it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from pdserve.errors import RequestError
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
from router.text.chat.conversation import Conversation

Block = TypeVar("Block")

# Claude Code begins its system prompt with a line that has a hash of the request, so no two requests share a prefix.
_REQUEST_HASH = "x-anthropic-billing-header:"


def read_messages(system: str | Sequence[TextOrImageParam], messages: Sequence[MessageParam]) -> MessagesChat:
    """Convert messages. Raises RequestError for blocks that a role may not have, and for open calls at its end."""
    chat = MessagesChat()
    chat.add_system(system, "system")
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        match message.role:
            case "system":
                chat.add_system(message.content, where)
            case "user":
                chat.add_user_blocks(message.content, where)
            case "assistant":
                chat.add_assistant_blocks(message.content, where)
    if not messages or not chat.messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    if chat.has_open_calls:
        raise RequestError("the last message has a tool_use; add a message with its tool_result", "messages")
    last = chat.messages[-1]
    if last["role"] == "assistant" and not any(last.get("content", ())):
        raise RequestError("the last message has no text to continue; end with a message of the user", "messages")
    return chat


def check_newest_turn(messages: Sequence[MessageParam]) -> None:
    """Raise RequestError for an image or document in the newest turn of the user, which the model cannot see.

    Beside tool results, which agents add by themselves, and in earlier turns the model reads a placeholder.
    """
    last = len(messages) - (1 if messages and messages[-1].role == "assistant" else 0)  # the last message is continued
    for index in range(last - 1, -1, -1):
        blocks = list(_blocks(messages[index].content, f"messages[{index}].content"))
        if messages[index].role == "assistant" or any(isinstance(block, ToolResultBlockParam) for block, _ in blocks):
            return
        for block, at in blocks:
            match block:
                case DocumentBlockParam(source={"type": "text", "data": str()}):
                    pass
                case ImageBlockParam() | DocumentBlockParam():
                    name = "an image" if isinstance(block, ImageBlockParam) else "a document without plain text"
                    raise RequestError(f"{at} is {name}; the model reads text only: leave it out", "messages")


class MessagesChat(Conversation):
    """Adds the content blocks of messages. ``unseen``: kinds of blocks of which the model reads only a placeholder."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen: list[str] = []

    def add_system(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        texts = (_without_hash(self._text(block, at)) for block, at in _blocks(content, where))
        self.add_instructions("\n".join(text for text in texts if text))

    def add_user_blocks(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        for block, at in _blocks(content, where):
            if isinstance(block, ToolResultBlockParam):
                self.add_result(block.tool_use_id, self._result(block, at))
            else:
                self.add_user(self._text(block, at))

    def add_assistant_blocks(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        message = self.begin_assistant()
        for block, at in _blocks(content, where):
            match block:
                case ThinkingBlockParam():
                    self.add_reasoning(block.thinking)
                case RedactedThinkingBlockParam():
                    pass
                case ToolUseBlockParam():
                    self.add_call(block.id, block.name, block.input)
                case _:
                    self.add_content(self._text(block, at))
        if "tool_calls" not in message:
            message.setdefault("content", [])  # templates expect content or calls

    def _result(self, block: ToolResultBlockParam, where: str) -> str:
        return "\n".join(self._text(part, at) for part, at in _blocks(block.content or "", f"{where}.content"))

    def _text(self, block: ContentBlockParam | TextualBlockParam, where: str) -> str:
        match block:
            case TextBlockParam():
                return block.text
            case SearchResultBlockParam():
                parts = (self._text(part, at) for part, at in _blocks(block.content, f"{where}.content"))
                return "\n".join([block.title, block.source, *parts])
            case ToolReferenceBlockParam():
                return block.tool_name
            case DocumentBlockParam(source={"type": "text", "data": str() as data}):
                return data
            case DocumentBlockParam():
                return self._placeholder("document")
            case ImageBlockParam():
                return self._placeholder("image")
            case _:
                tag = type(block).__struct_config__.tag
                raise RequestError(f"{where} has type {tag!r}, which its role may not have; use 'text'", "messages")

    def _placeholder(self, kind: str) -> str:
        """Stand in for a block that is no text: an error would end the session, whose later turns repeat the block."""
        self.unseen.append(kind)
        return f"[{kind}: this model reads text only]"


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
