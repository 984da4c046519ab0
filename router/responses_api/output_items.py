"""The output items of a response while they grow, and the events that tell of each step.

response.created, response.in_progress
  for each item:  response.output_item.added
                    response.content_part.added, deltas, done, response.content_part.done    (text and reasoning)
                    response.function_call_arguments.delta …, response.function_call_arguments.done       (calls)
                  response.output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from router.text.chat.pieces import OutputPiece, PieceKind

_encode = msgspec.json.encode
Fields = dict[str, Any]


class ItemWriter:
    """``items`` are the output so far. ``tell`` gets the bytes of each event."""

    def __init__(self, tell: Callable[[bytes], None], new_call_id: Callable[[], str]) -> None:
        self.items: list[Fields] = []
        self._tell = tell
        self._new_call_id = new_call_id
        self._sequence = 0
        self._open: Fields | None = None  # the last item, while it grows
        self._texts: list[str] = []  # its text or arguments so far
        self._logprobs: list[Fields] = []  # of tokens whose text is still to come

    def event(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        self._tell(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event)))

    def write(self, pieces: Sequence[OutputPiece], logprobs: Sequence[Fields] = ()) -> None:
        self._logprobs += logprobs
        for piece in pieces:
            if piece.kind is PieceKind.CALL:
                self._begin_call(piece.text)
            elif piece.kind is PieceKind.ARGUMENTS:
                self._add_arguments(piece.text)
            else:
                self._add_text("message" if piece.kind is PieceKind.CONTENT else "reasoning", piece.text)

    def end(self, complete: bool) -> None:
        """The output has ended, by itself or cut short. An output without anything is an empty message."""
        if not self.items:
            self._begin_text("message")
        self._close("completed" if complete else "incomplete")

    def settle(self) -> None:
        """Put into the item that grows what there is of its text."""
        item = self._open
        if item is None:
            return
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
        else:
            item["content"][0]["text"] = text

    def _begin(self, item: Fields) -> None:
        self._close("completed")
        self._open = {**item, "status": "in_progress"}
        self.items.append(self._open)
        self.event("response.output_item.added", output_index=self._index, item=self._open)

    def _close(self, status: str) -> None:
        self.settle()
        item, self._open = self._open, None
        self._texts = []
        if item is None:
            return
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": self._index}
            told = {"name": item["name"], "arguments": item["arguments"]}
            self.event("response.function_call_arguments.done", **place, **told)
        else:
            part = item["content"][0]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs = {"logprobs": part["logprobs"]} if name == "output_text" else {}
            self.event(f"response.{name}.done", **self._place(item), text=part["text"], **logprobs)
            self.event("response.content_part.done", **self._place(item), part=part)
        item["status"] = status
        self.event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self, item: Fields) -> Fields:
        return {"item_id": item["id"], "output_index": self._index, "content_index": 0}

    def _begin_text(self, kind: str) -> Fields:
        part: Fields
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._begin({"type": kind, "id": _new_id("msg"), "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            self._begin({"type": kind, "id": _new_id("rs"), "summary": [], "content": []})
        assert self._open is not None
        self._open["content"].append(part)
        self.event("response.content_part.added", **self._place(self._open), part=part)
        return self._open

    def _add_text(self, kind: str, text: str) -> None:
        item = self._open
        if item is None or item["type"] != kind:
            item = self._begin_text(kind)
        part = item["content"][0]
        self._texts.append(text)
        logprobs, self._logprobs = self._logprobs, []
        if kind == "message":
            part["logprobs"] += logprobs
            self.event("response.output_text.delta", **self._place(item), delta=text, logprobs=logprobs)
        else:
            self.event("response.reasoning_text.delta", **self._place(item), delta=text)

    def _begin_call(self, name: str) -> None:
        self._logprobs = []
        call = {"type": "function_call", "id": _new_id("fc"), "call_id": self._new_call_id()}
        self._begin({**call, "name": name, "arguments": ""})

    def _add_arguments(self, text: str) -> None:
        item = self._open
        assert item is not None
        self._texts.append(text)
        place = {"item_id": item["id"], "output_index": self._index}
        self.event("response.function_call_arguments.delta", **place, delta=text)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
