"""The input items of /v1/responses and the chat messages that they become."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any
from uuid import uuid4

from pdserve.errors import RequestError, cut, shown
from router.responses_api.compaction import PROMPT, decode_summary
from router.responses_api.tool_forms import SHELL, custom_arguments, function_name, shell_arguments
from router.text.chat.conversation import Conversation
from router.text.chat.image_parts import USER_OR_TOOL, ImagePart, Part, image_of_part
from router.text.chat.messages import join_parts, part_text

Item = dict[str, Any]

MAX_INPUT_ITEMS = 10_000
_ROLES = ("user", "assistant", "system", "developer")
_UNSEEN = "[an image, which this model cannot see]"
_LOST = "[an image, which is not stored]"
_IMAGES = ("input_image", "image_url", "computer_screenshot")  # types of parts
_MAX_SUMMARY = 20_000  # characters of the summary of a call that ran elsewhere
# Items of tools that run at a provider, with the fields that the model reads. Without any, the item is left out.
OF_PROVIDERS: dict[str, tuple[str, ...]] = {
    "web_search_call": ("action",),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
    "image_generation_call": ("revised_prompt",),
    "computer_call": ("action", "actions"),
    "computer_call_output": (),
    "mcp_call": ("server_label", "name", "arguments", "output", "error"),
    "mcp_list_tools": (),
    "mcp_approval_request": (),
    "mcp_approval_response": (),
    "shell_call": ("action",),
    "shell_call_output": ("output",),
    "apply_patch_call": ("operation",),
    "apply_patch_call_output": ("output",),
    "tool_search_call": ("arguments",),
    "tool_search_output": (),
    "additional_tools": (),
    "agent_message": ("author", "recipient", "content"),
    "ghost_snapshot": (),
    "compaction_trigger": (),
    "context_compaction": (),
}


def input_items(source: str | list[Item]) -> list[Item]:
    return [{"role": "user", "content": source}] if isinstance(source, str) else source


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def reference_of(item: Item) -> str | None:
    """Return the id of the stored item that ``item`` stands for. Raises RequestError."""
    if item.get("type") != "item_reference" and not ("id" in item and len(item) == 1):
        return None
    if not isinstance(item.get("id"), str):
        raise RequestError("an item_reference needs the id of an item", "input")
    return str(item["id"])


class InputChat(Conversation):
    """The chat of a list of items. A model without images refuses those in ``newest``, places of items.

    ``keep_images``: the items are stored later, so their images stay in them.
    """

    def __init__(self, newest: Collection[str] = (), keep_images: bool = False) -> None:
        super().__init__()
        self._newest = newest
        self._keep_images = keep_images
        self._call_ids: set[str] = set()

    def add_item(self, item: Item, where: str) -> None:
        """Raises RequestError that names the item, or its field."""
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                if reasoning := _reasoning(item, where):
                    self.add_reasoning(reasoning)
            case "function_call":
                self._call(item, _name(item, where), item.get("arguments"), where)
            case "custom_tool_call":
                self._call(item, _name(item, where), custom_arguments(_text(item, "input", where)), where)
            case "local_shell_call":
                self._call(item, SHELL, shell_arguments(item.get("action")), where)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._add_output(item, where)
            case "compaction":
                self.add_user(PROMPT)
                self.add_content(decode_summary(item.get("encrypted_content"), where))
            case str() if kind in OF_PROVIDERS:
                if (text := _summary(item)) is not None:
                    self.add_content(text)
            case _:
                kinds = "message, reasoning, function_call, function_call_output, item_reference, compaction"
                raise RequestError(f"{where} has type {shown(kind)}; use one of {kinds}", where)

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", where)
        parts = self._parts(item.get("content"), where, "content", shows_images=role == "user")
        if role == "assistant":
            self.add_content(*parts)
        elif role == "user":
            self.add_user(*parts)
        else:
            self.add_instructions(*parts)

    def _call(self, item: Item, name: str, arguments: Any, where: str) -> None:
        self._call_ids.add(call_id := _call_id(item, where))
        self.add_call(call_id, name, arguments)

    def _add_output(self, item: Item, where: str) -> None:
        if (call_id := _call_id(item, where)) not in self._call_ids:
            call = str(item["type"]).removesuffix("_output")
            text = f"no {call} before {where} has its call_id {shown(call_id)}; send that call, too"
            raise RequestError(text, where)
        self.add_result(call_id, *self._parts(item.get("output"), where, "output"))

    def _parts(self, content: Any, where: str, field: str, shows_images: bool = True) -> list[Part]:
        """Return texts and images of a content."""
        if not isinstance(content, list):
            return [join_parts(content, where) or ""]
        parts: list[Part] = []
        for at, part in enumerate(content):
            if not _is_image(part):
                parts.append(part_text(part, where, at))
            elif shows_images:
                parts.append(self._image(part, where, f"{where}.{field}[{at}]"))
            else:
                parts.append(ImagePart(f"{where}.{field}[{at}]", fault=USER_OR_TOOL, instead=self._instead(where)))
        return parts or [""]

    def _image(self, part: dict[str, Any], where: str, name: str) -> ImagePart:
        if where not in self._newest and part.get("image_url") is None and part.get("file_id") is None:
            return ImagePart(name, instead=_LOST, lost=True)
        return image_of_part(part, name, self._instead(where), self._keep_images)

    def _instead(self, where: str) -> str:
        return "" if where in self._newest else _UNSEEN


def input_chat(items: list[Item], instructions: str | None, keep_images: bool = False) -> InputChat:
    """Convert items to a chat. Raises RequestError."""
    if not items:
        raise RequestError("input is empty; give a text or at least one item", "input")
    if len(items) > MAX_INPUT_ITEMS:
        raise RequestError(f"the input has {len(items)} items; the limit is {MAX_INPUT_ITEMS}, send fewer", "input")
    chat = InputChat(_newest_messages(items), keep_images)
    chat.add_instructions(instructions or "")
    for index, item in enumerate(items):
        chat.add_item(item, where=f"input[{index}]")
    if not chat.messages:
        raise RequestError("the input has no text; give a message", "input")
    return chat


def _newest_messages(items: list[Item]) -> set[str]:
    """Return the places of the newest message of the user and those after it, whose images a model must see.

    In earlier messages, also of a conversation that is to be compacted, and in tool results it may read placeholders.
    Thus a client whose history keeps a refused image continues with the next message.
    """
    newest: set[str] = set()
    if items[-1].get("content") == PROMPT:
        return newest
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        kind = str(item.get("type", "message"))
        if OF_PROVIDERS.get(kind) == ():  # the model reads no field of the item
            continue
        if kind != "message" or item.get("role") == "assistant":
            break
        newest.add(f"input[{index}]")
        if item.get("role") == "user":
            break
    return newest


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGES


def _name(item: Item, where: str) -> str:
    return str(function_name(_text(item, "name", where), item.get("namespace")))


def _text(item: Item, field: str, where: str) -> str:
    text = item.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field} must be a string", where)
    return text


def _call_id(item: Item, where: str) -> str:
    """The id of a call; items of a local shell may have the id of the item instead."""
    call_id = item.get("call_id")
    if call_id is None and str(item.get("type")).startswith(SHELL):
        call_id = item.get("id")
    if not isinstance(call_id, str):
        raise RequestError(f"{where}.call_id must be a string", where)
    return call_id


def _summary(item: Item) -> str | None:
    """Return the text that the model reads of a call that ran elsewhere; None for items without such text."""
    kind = str(item["type"])
    fields = {name: item[name] for name in OF_PROVIDERS[kind] if item.get(name) not in (None, "", [], {})}
    if not fields:
        return None
    return cut(f"[{kind}] {json.dumps(fields, ensure_ascii=False)}", _MAX_SUMMARY)


def _reasoning(item: Item, where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = []
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: reasoning must be a list of parts with text", where)
        texts.append(part["text"])
    return "".join(texts)
