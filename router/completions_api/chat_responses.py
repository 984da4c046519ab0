"""Chat responses whose output is read: message and deltas with reasoning and tool calls.

What these hand on as the text of a choice is the JSON of a delta, or of the whole message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.response_formats import ChatFormat, FinishedChoice, Format
from router.completions_api.response_writers import ResponseOptions, StreamResponse, WholeResponse
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.usage import Usage
from router.text.chat.output_reading import OutputReading
from router.text.chat.pieces import Message, OutputPiece, PieceKind, message_of


class ReadChoice:
    """One choice of a response whose output is read."""

    def __init__(self, reading: OutputReading) -> None:
        self._parser = reading.new_parser()
        self._include_reasoning = reading.include_reasoning
        self._called = False

    def feed(self, choice: Choice, text: str, output: pb.Output, usage: Usage) -> list[OutputPiece]:
        """What this text tells. A choice that ends by itself after a call ends with "tool_calls"."""
        reasoned = self._parser.reasoning
        pieces = self._parser.push(text)
        if output.has_token and (reasoned or self._parser.reasoning):
            usage.reasoning_tokens += 1
        if choice.finish_reason:
            pieces += self._parser.flush()
        self._called = self._called or any(piece.kind is PieceKind.CALL for piece in pieces)
        if self._called and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        if not self._include_reasoning:
            pieces = [piece for piece in pieces if piece.kind is not PieceKind.REASONING]
        return pieces


class ReadChatFormat(ChatFormat):
    """A chat whose texts are JSON already."""

    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        return b'{"index":%d,"delta":%b' % (index, text.encode() or b"{}")

    def _whole_choice(self, choice: FinishedChoice) -> dict[str, Any]:
        return {"message": msgspec.Raw(choice.text.encode())}


class ReadChatStream(StreamResponse):
    def __init__(self, form: Format, options: ResponseOptions, jobs: Sequence[Job], reading: OutputReading) -> None:
        super().__init__(form, options, jobs)
        num_choices = sum(job.sampling.n for job in jobs)
        self._reads = [ReadChoice(reading) for _ in range(num_choices)]
        self._writers = [DeltaWriter(reading) for _ in range(num_choices)]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        pieces = self._reads[choice.index].feed(choice, text, output, self.generation.usage)
        super().on_delta(choice, self._writers[choice.index].write(pieces), output)


class ReadChatWhole(WholeResponse):
    def __init__(self, form: Format, options: ResponseOptions, jobs: Sequence[Job], reading: OutputReading) -> None:
        super().__init__(form, options, jobs)
        num_choices = sum(job.sampling.n for job in jobs)
        self._reading = reading
        self._reads = [ReadChoice(reading) for _ in range(num_choices)]
        self._pieces: list[list[OutputPiece]] = [[] for _ in range(num_choices)]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        pieces = self._pieces[choice.index]
        pieces += self._reads[choice.index].feed(choice, text, output, self.generation.usage)
        written = _message_json(message_of(pieces), self._reading) if choice.finish_reason else ""
        super().on_delta(choice, written, output)


def _message_json(message: Message, reading: OutputReading) -> str:
    fields: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        fields |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {
                "id": reading.new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return msgspec.json.encode(fields).decode()


class DeltaWriter:
    """Pieces of a choice as the JSON of a delta. Calls are numbered as they come."""

    def __init__(self, reading: OutputReading) -> None:
        self._new_call_id = reading.new_call_id
        self._num_calls = 0

    def write(self, pieces: Sequence[OutputPiece]) -> str:
        """Empty where there is nothing to tell."""
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
            self._num_calls += 1
            function = {"name": piece.text, "arguments": ""}
            calls.append(
                {"index": self._num_calls - 1, "id": self._new_call_id(), "type": "function", "function": function}
            )
        else:
            if not calls:
                calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += piece.text
