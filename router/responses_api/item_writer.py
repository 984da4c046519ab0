"""Output items from parsed deltas, and their events:

for each item:  response.output_item.added
                  response.content_part.added, deltas, done, response.content_part.done    (text and reasoning)
                  response.function_call_arguments.delta …, response.function_call_arguments.done       (calls)
                  response.custom_tool_call_input.delta, response.custom_tool_call_input.done    (custom tools)
                response.output_item.done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET

from router.completions_api.response_objects import TokenNames, chat_logprobs, lazy_chat_logprobs
from router.dialect.events import Event
from router.dialect.json_pieces import json_pieces
from router.generation.logprob_table import LogprobTable
from router.generation.token_logprob import TokenLogprob
from router.responses_api.input_items import new_id
from router.responses_api.output_objects import (
    CallItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    LocalShellCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from router.responses_api.tool_forms import SHELL, ToolOrigin, custom_input, shell_action
from router.text.chat.output_parser import DeltaKind, OutputDelta
from router.text.tokenizer import Tokenizer

Part = TypeVar("Part", OutputText, ReasoningText)


class EventStream(Protocol):
    def write(self, event: Event) -> None:
        """Write an event."""

    def write_large(self, kind: str, make: Callable[[], Iterator[bytes]]) -> None:
        """Write an event that is encoded as it is sent. ``make`` returns the pieces of its JSON, each time anew."""


class OutputItemWriter:
    """Build ``items`` from parsed deltas. Events go to ``stream``, if any. ``origins``: tools by function."""

    def __init__(
        self,
        new_call_id: Callable[[], str],
        tokenizer: Tokenizer,
        num_top: int,
        origins: Mapping[str, ToolOrigin] = MappingProxyType({}),
    ) -> None:
        self.items: list[OutputItem] = []
        self.stream: EventStream | None = None
        self._new_call_id = new_call_id
        self._names = TokenNames(tokenizer)
        self._num_top = num_top  # alternatives per token
        self._origins = origins
        self._sequence_number = 0
        self._open: OutputItem | None = None  # the last item, while it grows
        self._texts: list[str] = []  # text or arguments of the open item
        self._logprobs: list[TokenLogprob] = []  # log-probabilities of held-back tokens
        self._table = LogprobTable()  # log-probabilities of the latest message

    def event(self, kind: str, **fields: Any) -> None:
        if self.stream is not None:
            data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence_number, **fields})
            self._sequence_number += 1
            self.stream.write(Event(kind, data))

    def large_event(self, kind: str, **fields: Any) -> None:
        """Write an event whose fields may be large; they must not change any more."""
        if self.stream is not None:
            data = {"type": kind, "sequence_number": self._sequence_number, **fields}
            self._sequence_number += 1
            self.stream.write_large(kind, lambda: json_pieces(data))

    def write(self, deltas: Sequence[OutputDelta], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self._logprobs += logprobs
        for delta in deltas:
            match delta.kind:
                case DeltaKind.CALL:
                    self._logprobs = []
                    self._add_call(delta.text)
                case DeltaKind.ARGUMENTS:
                    self._texts.append(delta.text)
                    if isinstance(self._open, FunctionCallItem):  # other calls are converted when complete
                        self.event("response.function_call_arguments.delta", **self._position(), delta=delta.text)
                case DeltaKind.CONTENT:
                    self._add_text(delta.text)
                case DeltaKind.REASONING:
                    self._add_reasoning(delta.text)

    def end(self, complete: bool) -> None:
        """Close the last item; ``complete`` is False for output cut by its limit. Empty output is an empty message."""
        if not self.items:
            self._add_message()
        self._close("completed" if complete else "incomplete")

    def abandon(self) -> None:
        """End after a failure: the open item keeps its text so far."""
        self.settle()
        if self._open is not None:
            self._open.status = "incomplete"

    def settle(self) -> None:
        """Put the text so far into the open item."""
        text = "".join(self._texts)
        match self._open:
            case FunctionCallItem() as call:
                call.arguments = text
            case CustomToolCallItem() as call:
                call.input = custom_input(text)
            case LocalShellCallItem() as call:
                call.action = shell_action(text)
            case ReasoningItem(content=[part]):
                part.text = text
            case OutputMessage(content=[part]):
                part.text = text
                if self._table.token_ids:
                    part.logprobs = lazy_chat_logprobs(self._names, [self._table], self._num_top).content

    def _add_item(self, item: OutputItem) -> None:
        self._close("completed")
        self._open = item
        self.items.append(item)
        self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        self.settle()
        item = self._open
        self._open = None
        self._texts = []
        match item:
            case None:
                return
            case FunctionCallItem():
                done = "response.function_call_arguments.done"
                self.large_event(done, **self._position(), name=item.name, arguments=item.arguments)
            case CustomToolCallItem():
                kind = "response.custom_tool_call_input"
                self.large_event(f"{kind}.delta", **self._position(), delta=item.input)
                self.large_event(f"{kind}.done", **self._position(), input=item.input)
            case OutputMessage(content=[part]):
                done = "response.output_text.done"
                self.large_event(done, **self._content_position(), text=part.text, logprobs=part.logprobs)
                self.large_event("response.content_part.done", **self._content_position(), part=part)
            case ReasoningItem(content=[part]):
                self.large_event("response.reasoning_text.done", **self._content_position(), text=part.text)
                self.large_event("response.content_part.done", **self._content_position(), part=part)
        item.status = status
        self.large_event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _position(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _content_position(self) -> dict[str, Any]:
        return {**self._position(), "content_index": 0}

    def _add_call(self, function: str) -> None:
        self._add_item(self._new_call(self._origins.get(function) or ToolOrigin("function", function)))

    def _new_call(self, tool: ToolOrigin) -> CallItem:
        call_id = self._new_call_id()
        status: ItemStatus = "in_progress"
        namespace = tool.namespace or UNSET
        if tool.kind == SHELL:
            return LocalShellCallItem(new_id("lsh"), call_id, action=shell_action("{}"), status=status)
        if tool.kind == "custom":
            return CustomToolCallItem(new_id("ctc"), call_id, tool.name, input="", status=status, namespace=namespace)
        return FunctionCallItem(new_id("fc"), call_id, tool.name, arguments="", status=status, namespace=namespace)

    def _add_message(self) -> None:
        self._table = LogprobTable()
        message = OutputMessage(new_id("msg"), "assistant", content=[], status="in_progress")
        self._add_text_item(message, message.content, OutputText("", [], []))

    def _add_text_item(self, item: OutputMessage | ReasoningItem, content: list[Part], part: Part) -> None:
        self._add_item(item)
        content.append(part)
        self.event("response.content_part.added", **self._content_position(), part=part)

    def _add_text(self, text: str) -> None:
        if not isinstance(self._open, OutputMessage):
            self._add_message()
        self._texts.append(text)
        for token in self._logprobs:
            self._table.add(token)
        logprobs = chat_logprobs(self._names, self._logprobs, self._num_top).content
        self._logprobs = []
        self.event("response.output_text.delta", **self._content_position(), delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(new_id("rs"), summary=[], content=[], status="in_progress")
            self._add_text_item(item, item.content, ReasoningText(""))
        self._texts.append(text)
        self._logprobs = []
        self.event("response.reasoning_text.delta", **self._content_position(), delta=text)
