"""Chat responses whose output is parsed into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.response_encoders import ChatEncoder, ResponseEncoder
from router.completions_api.response_objects import ChatMessage, FunctionCall, ToolCall
from router.completions_api.response_writers import FullResponse, ResponseOptions, StreamedResponse
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.usage import Usage
from router.text.chat.output_reading import OutputReading
from router.text.chat.pieces import OutputPiece, PieceKind, message_of


class ChoiceParser:
    """Parse the output of one choice. Sets ``finish_reason`` "tool_calls" and counts reasoning tokens."""

    def __init__(self, reading: OutputReading) -> None:
        self._parser = reading.new_parser()
        self._include_reasoning = reading.include_reasoning
        self._has_call = False

    def feed(self, choice: Choice, text: str, output: pb.Output, usage: Usage) -> list[OutputPiece]:
        was_reasoning = self._parser.reasoning
        pieces = self._parser.push(text)
        if output.has_token and (was_reasoning or self._parser.reasoning):
            usage.reasoning_tokens += 1
        if choice.finish_reason:
            pieces += self._parser.flush()
        self._has_call = self._has_call or any(piece.kind is PieceKind.CALL for piece in pieces)
        if self._has_call and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        if not self._include_reasoning:
            pieces = [piece for piece in pieces if piece.kind is not PieceKind.REASONING]
        return pieces


class ParsedChatEncoder(ChatEncoder):
    """The text of a chunk is the JSON of a delta."""

    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        return b'{"index":%d,"delta":%b' % (index, text.encode() or b"{}")


class StreamedParsedChat(StreamedResponse):
    def __init__(
        self, encoder: ResponseEncoder, options: ResponseOptions, jobs: Sequence[Job], reading: OutputReading
    ) -> None:
        super().__init__(encoder, options, jobs)
        self._parsers = [ChoiceParser(reading) for _ in range(self.num_choices)]
        self._deltas = [DeltaEncoder(reading) for _ in range(self.num_choices)]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        pieces = self._parsers[choice.index].feed(choice, text, output, self.generation.usage)
        super().on_delta(choice, self._deltas[choice.index].encode(pieces), output)


class FullParsedChat(FullResponse):
    def __init__(
        self, encoder: ResponseEncoder, options: ResponseOptions, jobs: Sequence[Job], reading: OutputReading
    ) -> None:
        super().__init__(encoder, options, jobs)
        self._reading = reading
        self._parsers = [ChoiceParser(reading) for _ in range(self.num_choices)]
        self._pieces: list[list[OutputPiece]] = [[] for _ in range(self.num_choices)]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        pieces = self._pieces[choice.index]
        pieces += self._parsers[choice.index].feed(choice, text, output, self.generation.usage)
        super().on_delta(choice, "", output)
        if choice.finish_reason:
            self._choices[choice.index].message = _chat_message(pieces, self._reading)


def _chat_message(pieces: Sequence[OutputPiece], reading: OutputReading) -> ChatMessage:
    parsed = message_of(pieces)
    message = ChatMessage("assistant", parsed.content, None)
    if parsed.reasoning:
        message.reasoning = message.reasoning_content = parsed.reasoning
    if parsed.calls:
        message.content = parsed.content or None
        message.tool_calls = [
            ToolCall(reading.new_call_id(), "function", FunctionCall(call.name, call.arguments))
            for call in parsed.calls
        ]
    return message


class DeltaEncoder:
    """Encode the pieces of a choice as deltas. Tool calls are numbered in order."""

    def __init__(self, reading: OutputReading) -> None:
        self._new_call_id = reading.new_call_id
        self._num_calls = 0

    def encode(self, pieces: Sequence[OutputPiece]) -> str:
        """JSON, or "" without pieces."""
        delta: dict[str, Any] = {}
        for piece in pieces:
            if piece.kind is PieceKind.CONTENT:
                delta["content"] = delta.get("content", "") + piece.text
            elif piece.kind is PieceKind.REASONING:
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + piece.text
            else:
                self._add_call(delta.setdefault("tool_calls", []), piece)
        return msgspec.json.encode(delta).decode() if delta else ""

    def _add_call(self, calls: list[dict[str, Any]], piece: OutputPiece) -> None:
        if piece.kind is PieceKind.CALL:
            call = {"index": self._num_calls, "id": self._new_call_id(), "type": "function"}
            calls.append({**call, "function": {"name": piece.text, "arguments": ""}})
            self._num_calls += 1
            return
        if not calls:
            calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.text
