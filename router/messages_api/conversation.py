"""A conversation of /v1/messages as messages of a chat.

user:       text          ──► user            consecutive ones become one message
            tool_result   ──► tool            one message each, before the text that follows it
assistant:  text, thinking, tool_use ──► one assistant message
system:     at the beginning ──► system; later ──► the end of the user's message or tool result before it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

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
from router.text.chat.conversation import Conversation
from router.text.chat.image_parts import USER_OR_TOOL, ImagePart, Part, image_of_base64, image_of_url

Block = TypeVar("Block")

# Claude Code begins its system prompt with a line that has a hash of the request, so no two requests share a prefix.
_REQUEST_HASH = "x-anthropic-billing-header:"


def read_messages(
    system: str | Sequence[TextOrImageParam], messages: Sequence[MessageParam], newest: Collection[str] = ()
) -> MessagesChat:
    """Convert messages. ``newest``: contents whose images a model must see; others may be placeholders.

    Raises RequestError for blocks that a role may not have, and for open calls at its end.
    """
    chat = MessagesChat(newest)
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


def newest_turn(messages: Sequence[MessageParam]) -> set[str]:
    """Return the places of the contents of the user's newest turn. Raises RequestError for a document in it.

    Beside tool results, which agents add by themselves, and in earlier turns the model may read a placeholder.
    """
    newest: set[str] = set()
    last = len(messages) - (1 if messages and messages[-1].role == "assistant" else 0)  # the last message is continued
    for index in range(last - 1, -1, -1):
        where = f"messages[{index}].content"
        blocks = list(_blocks(messages[index].content, where))
        if messages[index].role == "assistant" or any(isinstance(block, ToolResultBlockParam) for block, _ in blocks):
            break
        newest.add(where)
        for block, at in blocks:
            match block:
                case DocumentBlockParam(source={"type": "text", "data": str()}):
                    pass
                case DocumentBlockParam():
                    text = f"{at} is a document without plain text; the model reads no others: leave it out"
                    raise RequestError(text, "messages")
    return newest


class MessagesChat(Conversation):
    """Adds the content blocks of messages. ``num_documents``: those of which the model reads only a placeholder.

    A model without images refuses those in ``newest``, places of contents.
    """

    def __init__(self, newest: Collection[str] = ()) -> None:
        super().__init__()
        self.num_documents = 0
        self._newest = newest

    def add_system(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        parts = (part for block, at in _blocks(content, where) for part in self._parts(block, at))
        kept = (_without_hash(part) if isinstance(part, str) else _misplaced(part) for part in parts)
        self.add_instructions(*(part for part in kept if part))

    def add_user_blocks(self, content: str | Sequence[ContentBlockParam], where: str) -> None:
        for block, at in _blocks(content, where):
            if isinstance(block, ToolResultBlockParam):
                self.add_result(block.tool_use_id, *self._result(block, at))
            else:
                self.add_user(*self._parts(block, at, where in self._newest))

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
                    parts = self._parts(block, at)
                    self.add_content(*(part if isinstance(part, str) else _misplaced(part) for part in parts))
        if "tool_calls" not in message:
            message.setdefault("content", [])  # templates expect content or calls

    def _result(self, block: ToolResultBlockParam, where: str) -> list[Part]:
        blocks = _blocks(block.content or "", f"{where}.content")
        return [part for nested, at in blocks for part in self._parts(nested, at)]

    def _parts(
        self, block: ContentBlockParam | TextualBlockParam, where: str, is_newest: bool = False
    ) -> Sequence[Part]:
        match block:
            case TextBlockParam():
                return [block.text]
            case SearchResultBlockParam():
                blocks = _blocks(block.content, f"{where}.content")
                nested = (part for inner, at in blocks for part in self._parts(inner, at))
                return [block.title, block.source, *nested]
            case ToolReferenceBlockParam():
                return [block.tool_name]
            case DocumentBlockParam(source={"type": "text", "data": str() as data}):
                return [data]
            case DocumentBlockParam():
                self.num_documents += 1
                return [_placeholder("document")]
            case ImageBlockParam():
                return [_image(block, where, "" if is_newest else _placeholder("image"))]
            case _:
                tag = type(block).__struct_config__.tag
                raise RequestError(f"{where} has type {tag!r}, which its role may not have; use 'text'", "messages")


def _image(block: ImageBlockParam, where: str, instead: str) -> ImagePart:
    """Read an image. Its data is taken out of the block, so that its memory is freed with the ImagePart."""
    match block.source.get("type"):
        case "base64":
            return image_of_base64(block.source.pop("data", None), where, instead)
        case "url":
            return image_of_url(block.source.pop("url", None), where, instead=instead)
        case kind:
            fault = f"has a source of type {shown(kind)}; use 'base64', no files are kept here"
            return ImagePart(where, fault=fault, instead=instead)


def _misplaced(image: ImagePart) -> ImagePart:
    return ImagePart(image.name, fault=USER_OR_TOOL, instead=image.instead)


def _placeholder(kind: str) -> str:
    """Stand in for a block that is no text: an error would end the session, whose later turns repeat the block."""
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
