"""Chat responses whose output is parsed into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.request_bodies import ChatBody
from router.completions_api.response_encoders import ChatEncoder, FinishedChoice, ResponseEncoder
from router.completions_api.response_objects import ChatMessage, FunctionCall, ToolCall
from router.completions_api.response_writers import FullResponse, StreamedResponse
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.logprob_table import LogprobTable
from router.generation.usage import Usage
from router.text.chat.output_parser import DeltaKind, Message, MessageBuilder, OutputDelta
from router.text.chat.output_parsing import OutputParsing


class ChoiceParser:
    """Parse the output of one choice. Sets ``finish_reason`` "tool_calls" and counts reasoning tokens."""

    def __init__(self, parsing: OutputParsing) -> None:
        self._parser = parsing.new_parser()
        self._include_reasoning = parsing.include_reasoning
        self._forced = parsing.forced
        self._has_call = False

    def feed(self, choice: Choice, text: str, output: pb.Output, usage: Usage) -> list[OutputDelta]:
        was_reasoning = self._parser.reasoning
        deltas = self._parser.push(text)
        if output.has_token and (was_reasoning or self._parser.reasoning):
            usage.reasoning_tokens += 1
        if choice.finish_reason:
            held = self._parser.flush(finished=choice.finish_reason == "stop" and not choice.stop_string)
            deltas += [delta for delta in held if not (self._forced and delta.kind is DeltaKind.CONTENT)]
        self._has_call = self._has_call or any(delta.kind is DeltaKind.CALL for delta in deltas)
        if self._has_call and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        if not self._include_reasoning:
            deltas = [delta for delta in deltas if delta.kind is not DeltaKind.REASONING]
        return deltas


class ParsedChatEncoder(ChatEncoder):
    """The text of a chunk is the JSON of a delta."""

    choice_format = b'{"index":%d,"delta":%b'

    @staticmethod
    def text_json(text: str) -> bytes:
        return text.encode() or b'{"reasoning_content":null}'

    def echo_chunk(self, index: int, text: str, table: LogprobTable | None, usage: Usage | None) -> Iterator[bytes]:
        delta = msgspec.json.encode({"content": text, "reasoning_content": None})
        return super().echo_chunk(index, delta.decode(), table, usage=usage)


class StreamedParsedChat(StreamedResponse):
    def __init__(self, encoder: ResponseEncoder, body: ChatBody, jobs: Sequence[Job], parsing: OutputParsing) -> None:
        super().__init__(encoder, body, jobs)
        self._parsers = [ChoiceParser(parsing) for _ in range(self.num_choices)]
        self._deltas = [DeltaEncoder(parsing) for _ in range(self.num_choices)]
        self._streams_reasoning = body.stream_reasoning
        self._held: list[list[OutputDelta]] = [[] for _ in range(self.num_choices)]  # reasoning that has not ended

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        deltas = self._parsers[choice.index].feed(choice, text, output, usage=self.generation.usage)
        if not self._streams_reasoning:
            deltas = self._with_whole_reasoning(choice, deltas)
        super().on_delta(choice, self._deltas[choice.index].encode(deltas), output)

    def _with_whole_reasoning(self, choice: Choice, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Return no deltas until something follows the reasoning, or the choice ends."""
        deltas = self._held[choice.index] + deltas
        reasons = not choice.finish_reason and all(delta.kind is DeltaKind.REASONING for delta in deltas)
        self._held[choice.index] = deltas if reasons else []
        return [] if reasons else deltas


class FullParsedChat(FullResponse):
    def __init__(self, encoder: ResponseEncoder, body: ChatBody, jobs: Sequence[Job], parsing: OutputParsing) -> None:
        super().__init__(encoder, body, jobs)
        self._parsing = parsing
        self._parsers = [ChoiceParser(parsing) for _ in range(self.num_choices)]
        self._messages = [MessageBuilder() for _ in range(self.num_choices)]

    def _add_text(self, choice: Choice, text: str, output: pb.Output) -> None:
        deltas = self._parsers[choice.index].feed(choice, text, output, usage=self.generation.usage)
        self._messages[choice.index].add(deltas)

    def _finished(self, choice: Choice, prompt: int, echo: list[LogprobTable]) -> FinishedChoice:
        finished = super()._finished(choice, prompt, echo)
        message = self._messages[choice.index].message()
        message = msgspec.structs.replace(message, content=self._echo_text(choice.index) + message.content)
        finished.message = _chat_message(message, self._parsing)
        return finished


def _chat_message(parsed: Message, parsing: OutputParsing) -> ChatMessage:
    message = ChatMessage("assistant", parsed.content, None)
    if parsed.reasoning:
        message.reasoning = message.reasoning_content = parsed.reasoning
    if parsed.calls:
        message.content = parsed.content or None
        message.tool_calls = [
            ToolCall(parsing.new_call_id(), "function", FunctionCall(call.name, call.arguments))
            for call in parsed.calls
        ]
    return message


class DeltaEncoder:
    """Encode parsed deltas as OpenAI's. Tool calls are numbered in order."""

    def __init__(self, parsing: OutputParsing) -> None:
        self._new_call_id = parsing.new_call_id
        self._num_calls = 0

    def encode(self, deltas: Sequence[OutputDelta]) -> str:
        """JSON, or "" without deltas."""
        delta: dict[str, Any] = {}
        for part in deltas:
            if part.kind is DeltaKind.CONTENT:
                delta["content"] = delta.get("content", "") + part.text
            elif part.kind is DeltaKind.REASONING:
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + part.text
            else:
                self._add_call(delta.setdefault("tool_calls", []), part)
        return msgspec.json.encode({"reasoning_content": None, **delta}).decode() if delta else ""

    def _add_call(self, calls: list[dict[str, Any]], part: OutputDelta) -> None:
        if part.kind is DeltaKind.CALL:
            call = {"index": self._num_calls, "id": self._new_call_id(), "type": "function"}
            calls.append({**call, "function": {"name": part.text, "arguments": ""}})
            self._num_calls += 1
            return
        if not calls:
            calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += part.text
