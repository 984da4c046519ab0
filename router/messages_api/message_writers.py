"""The response of /v1/messages, in full and as a stream of events:

message_start, ping
  for each block:  content_block_start, content_block_delta …, content_block_stop
message_delta, message_stop | error
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

import msgspec
from msgspec import UNSET

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.parsed_chat import ChoiceParser
from router.dialect.events import Event
from router.dialect.json_pieces import json_chunks
from router.dialect.responses import BodyResponse, EventStreamResponse, Response
from router.generation.choice import Choice
from router.generation.job import Job
from router.messages_api.errors import MESSAGES_ERRORS
from router.messages_api.request import MessagesBody
from router.messages_api.response_objects import (
    ContentBlock,
    Message,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from router.text.chat.output_parser import DeltaKind, OutputDelta
from router.text.chat.output_parsing import OutputParsing

# Clients send a thinking block back only if it has a signature.
_SIGNATURE = "unsigned"
_STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTA = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}'
_DELTA_FIELDS = {
    DeltaKind.CONTENT: (b"text_delta", b"text"),
    DeltaKind.REASONING: (b"thinking_delta", b"thinking"),
    DeltaKind.ARGUMENTS: (b"input_json_delta", b"partial_json"),
}
_NO_INPUT = msgspec.Raw(b"{}")

_encode = msgspec.json.encode


class MessageResponse(Response):
    """A response whose one choice is parsed into content blocks."""

    def __init__(
        self, body: MessagesBody, model: str, request_id: str, jobs: Sequence[Job], parsing: OutputParsing
    ) -> None:
        super().__init__(jobs)
        self._model = model
        self._request_id = request_id
        self._max_tokens = body.request.max_tokens
        self._warnings = [*body.warnings, *parsing.warnings]
        self._parser = ChoiceParser(parsing)
        self._new_call_id = parsing.new_call_id

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        for delta in self._parser.feed(choice, text, output, usage=self.generation.usage):
            self._add(delta)

    @abstractmethod
    def _add(self, delta: OutputDelta) -> None:
        """Handle a parsed delta."""

    def _message(self, content: list[ContentBlock], reason: StopReason | None, stop: str | None) -> Message:
        return Message(
            id="msg_" + self._request_id,
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=MessageUsage.of(self.generation.usage),
            warnings=self._warnings or UNSET,
        )

    def _stop(self) -> tuple[StopReason, str | None]:
        """Return ``stop_reason`` and ``stop_sequence``, after the end."""
        (choice,) = self.generation.runs[0].choices
        reason = _STOP_REASONS[choice.finish_reason]
        if reason == "end_turn" and choice.stop_string:
            return "stop_sequence", choice.stop_string
        if reason == "max_tokens" and self.jobs[0].sampling.max_tokens < self._max_tokens:
            return "model_context_window_exceeded", None
        return reason, None


class FullMessage(MessageResponse, BodyResponse):
    def __init__(
        self, body: MessagesBody, model: str, request_id: str, jobs: Sequence[Job], parsing: OutputParsing
    ) -> None:
        super().__init__(body, model, request_id, jobs=jobs, parsing=parsing)
        self._blocks: list[tuple[DeltaKind, str, StringIO]] = []  # kind, name of the tool, text or input

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        super().on_delta(choice, text, output)
        self.hold(text, 0)

    def _add(self, delta: OutputDelta) -> None:
        if delta.kind is DeltaKind.CALL:
            self._blocks.append((delta.kind, delta.text, StringIO()))
            return
        if delta.kind is not DeltaKind.ARGUMENTS and (not self._blocks or self._blocks[-1][0] is not delta.kind):
            self._blocks.append((delta.kind, "", StringIO()))
        self._blocks[-1][2].write(delta.text)

    def body(self) -> Iterator[bytes]:
        content = [self._block(kind, name, text.getvalue()) for kind, name, text in self._blocks]
        reason, stop = self._stop()
        return json_chunks(self._message(content, reason, stop))

    def _block(self, kind: DeltaKind, name: str, text: str) -> ContentBlock:
        match kind:
            case DeltaKind.CONTENT:
                return TextBlock(text)
            case DeltaKind.REASONING:
                return ThinkingBlock(text, _SIGNATURE)
            case _:
                return ToolUseBlock(self._new_call_id(), name, _input(text))


def _input(arguments: str) -> msgspec.Raw:
    """The arguments as a JSON object. Those that are no object, or cut off, become Anthropic's INVALID_JSON."""
    if not arguments.strip():
        return _NO_INPUT
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return msgspec.Raw(_encode({"INVALID_JSON": arguments}))


class StreamedMessage(MessageResponse, EventStreamResponse):
    ping = Event("ping", b'{"type":"ping"}')

    def __init__(
        self, body: MessagesBody, model: str, request_id: str, jobs: Sequence[Job], parsing: OutputParsing
    ) -> None:
        super().__init__(body, model, request_id, jobs=jobs, parsing=parsing)
        self._index = -1  # index of the last block; -1: no block yet
        self._open: DeltaKind | None = None  # the kind of the last block, while it grows
        self._has_start = False

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        if not self._has_start:
            self._has_start = True
            message = self._message([], None, None)
            message.usage.output_tokens = 0  # the first token is in a block after this event
            self._event("message_start", message=message)
            self.write(self.ping)
            self._start()
        super().on_delta(choice, text, output)

    def on_end(self, error: PdserveError | None) -> None:
        if error is None:
            self._close_block()
            reason, stop = self._stop()
            usage = MessageUsage.of(self.generation.usage)
            self._event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage)
            self._event("message_stop")
        elif self.started:
            self.write(Event("error", MESSAGES_ERRORS.body(error, self._request_id)))
        super().on_end(error)

    def _add(self, delta: OutputDelta) -> None:
        match delta.kind:
            case DeltaKind.CALL:
                self._open_block(delta.kind, ToolUseBlock(self._new_call_id(), delta.text, _NO_INPUT))
                return
            case DeltaKind.CONTENT if self._open is not DeltaKind.CONTENT:
                self._open_block(delta.kind, TextBlock(""))
            case DeltaKind.REASONING if self._open is not DeltaKind.REASONING:
                self._open_block(delta.kind, ThinkingBlock("", ""))
        kind, field = _DELTA_FIELDS[delta.kind]
        self.write(Event("content_block_delta", _DELTA % (self._index, kind, field, _encode(delta.text))))

    def _open_block(self, kind: DeltaKind, block: ContentBlock) -> None:
        self._close_block()
        self._open = kind
        self._index += 1
        self._event("content_block_start", index=self._index, content_block=block)

    def _close_block(self) -> None:
        if self._open is DeltaKind.REASONING:
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            self._event("content_block_delta", index=self._index, delta=signature)
        if self._open is not None:
            self._event("content_block_stop", index=self._index)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> None:
        self.write(Event(kind, _encode({"type": kind, **fields})))
