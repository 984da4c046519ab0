"""The output items of a response while they grow, and their events.

response.created, response.in_progress
  for each item:  response.output_item.added
                    response.content_part.added, deltas, done, response.content_part.done    (text and reasoning)
                    response.function_call_arguments.delta …, response.function_call_arguments.done       (calls)
                  response.output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from uuid import uuid4

import msgspec

from router.completions_api.response_objects import ChatTokenLogprob
from router.responses_api.output_objects import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from router.text.chat.output_parser import DeltaKind, OutputDelta


class OutputItemWriter:
    """Build ``items`` from parsed deltas. ``write_event`` takes the bytes of each event."""

    def __init__(self, write_event: Callable[[bytes], None], new_call_id: Callable[[], str]) -> None:
        self.items: list[OutputItem] = []
        self.write_event = write_event
        self._new_call_id = new_call_id
        self._sequence_number = 0
        self._open: OutputItem | None = None  # the last item, while it grows
        self._texts: list[str] = []  # text or arguments of the open item
        self._logprobs: list[ChatTokenLogprob] = []  # of tokens whose text is held back

    def event(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        self.write_event(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def write(self, deltas: Sequence[OutputDelta], logprobs: Sequence[ChatTokenLogprob] = ()) -> None:
        self._logprobs += logprobs
        for delta in deltas:
            match delta.kind:
                case DeltaKind.CALL:
                    self._logprobs = []
                    call = FunctionCallItem(_new_id("fc"), self._new_call_id(), delta.text, "", "in_progress")
                    self._add_item(call)
                case DeltaKind.ARGUMENTS:
                    self._texts.append(delta.text)
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

    def settle(self) -> None:
        """Put the text so far into the open item."""
        text = "".join(self._texts)
        match self._open:
            case FunctionCallItem() as call:
                call.arguments = text
            case OutputMessage() | ReasoningItem() as item:
                item.content[0].text = text

    def _add_item(self, item: OutputItem) -> None:
        self._close("completed")
        self._open = item
        self.items.append(item)
        self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        self.settle()
        item, self._open = self._open, None
        self._texts = []
        match item:
            case None:
                return
            case FunctionCallItem():
                done = "response.function_call_arguments.done"
                self.event(done, **self._position(), name=item.name, arguments=item.arguments)
            case OutputMessage(content=[part]):
                done = "response.output_text.done"
                self.event(done, **self._content_position(), text=part.text, logprobs=part.logprobs)
                self.event("response.content_part.done", **self._content_position(), part=part)
            case ReasoningItem(content=[part]):
                self.event("response.reasoning_text.done", **self._content_position(), text=part.text)
                self.event("response.content_part.done", **self._content_position(), part=part)
        item.status = status
        self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _position(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _content_position(self) -> dict[str, Any]:
        return {**self._position(), "content_index": 0}

    def _add_message(self) -> OutputText:
        message = OutputMessage(_new_id("msg"), "assistant", [], "in_progress")
        self._add_item(message)
        part = OutputText("", [], [])
        message.content.append(part)
        self.event("response.content_part.added", **self._content_position(), part=part)
        return part

    def _add_text(self, text: str) -> None:
        part = self._open.content[0] if isinstance(self._open, OutputMessage) else self._add_message()
        self._texts.append(text)
        logprobs, self._logprobs = self._logprobs, []
        part.logprobs += logprobs
        self.event("response.output_text.delta", **self._content_position(), delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(_new_id("rs"), [], [], "in_progress")
            self._add_item(item)
            part = ReasoningText("")
            item.content.append(part)
            self.event("response.content_part.added", **self._content_position(), part=part)
        self._texts.append(text)
        self._logprobs = []
        self.event("response.reasoning_text.delta", **self._content_position(), delta=text)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
