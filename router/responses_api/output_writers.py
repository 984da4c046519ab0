"""The response of /v1/responses, in full and as a stream of events:

response.created, response.in_progress
  for each item:  response.output_item.added
                    response.content_part.added, deltas, done, response.content_part.done    (text and reasoning)
                    response.function_call_arguments.delta …, response.function_call_arguments.done       (calls)
                  response.output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar
from uuid import uuid4

import msgspec

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import SamplingParams
from router.completions_api.json_pieces import json_chunks, json_pieces
from router.completions_api.parsed_chat import ChoiceParser
from router.completions_api.response_objects import chat_logprobs, lazy_chat_logprobs
from router.completions_api.response_writers import BodyResponse, EventStreamResponse, Response
from router.errors import status_and_type
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.logprob_table import LogprobTable
from router.generation.token_logprob import TokenLogprob
from router.responses_api.output_objects import (
    FunctionCallItem,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from router.responses_api.request import ResponsesBody
from router.text.chat.output_parser import DeltaKind, OutputDelta
from router.text.chat.output_parsing import OutputParsing
from router.text.tokenizer import Tokenizer

_CUT = "length"  # the finish reason of an incomplete response
# Fields that a response repeats from its request.
_REPEATED = ("instructions", "max_output_tokens", "metadata", "tool_choice", "tools", "top_logprobs", "truncation")

Part = TypeVar("Part", OutputText, ReasoningText)


def new_response(body: ResponsesBody, model: str, request_id: str, sampling: SamplingParams) -> ResponseObject:
    """A response in progress, without output."""
    request = body.request
    return ResponseObject(
        id="resp_" + request_id,
        object="response",
        created_at=int(time.time()),
        model=model,
        **{name: getattr(request, name) for name in _REPEATED},
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=None,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        background=False,
        store=False,
        temperature=sampling.temperature,
        text={"format": request.text.format or {"type": "text"}},
        top_p=sampling.top_p,
        user=body.user,
        status="in_progress",
        error=None,
        incomplete_details=None,
        output=[],
        usage=None,
    )


class EventStream(Protocol):
    def write(self, chunk: bytes) -> None:
        """Write an event."""

    def write_large(self, pieces: Iterator[bytes]) -> None:
        """Write an event that is encoded as it is sent."""


class OutputItemWriter:
    """Build ``items`` from parsed deltas. Events go to ``stream``, if any."""

    def __init__(self, new_call_id: Callable[[], str], tokenizer: Tokenizer, num_top: int) -> None:
        self.items: list[OutputItem] = []
        self.stream: EventStream | None = None
        self._new_call_id = new_call_id
        self._tokenizer = tokenizer
        self._num_top = num_top  # alternatives per token
        self._sequence_number = 0
        self._open: OutputItem | None = None  # the last item, while it grows
        self._texts: list[str] = []  # text or arguments of the open item
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._table = LogprobTable()  # of the latest message

    def event(self, kind: str, **fields: Any) -> None:
        if self.stream is not None:
            data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence_number, **fields})
            self._sequence_number += 1
            self.stream.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def large_event(self, kind: str, **fields: Any) -> None:
        """Write an event whose fields may be large; they must not change any more."""
        if self.stream is not None:
            data = json_pieces({"type": kind, "sequence_number": self._sequence_number, **fields})
            self._sequence_number += 1
            self.stream.write_large(chain([b"event: %b\ndata: " % kind.encode()], data, [b"\n\n"]))

    def write(self, deltas: Sequence[OutputDelta], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self._logprobs += logprobs
        for delta in deltas:
            match delta.kind:
                case DeltaKind.CALL:
                    self._logprobs = []
                    self._add_item(FunctionCallItem(_new_id("fc"), self._new_call_id(), delta.text, "", "in_progress"))
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
            case ReasoningItem(content=[part]):
                part.text = text
            case OutputMessage(content=[part]):
                part.text = text
                if self._table.token_ids:
                    part.logprobs = lazy_chat_logprobs(self._tokenizer, [self._table], self._num_top).content

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
                self.large_event(done, **self._position(), name=item.name, arguments=item.arguments)
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

    def _add_message(self) -> None:
        self._table = LogprobTable()
        message = OutputMessage(_new_id("msg"), "assistant", [], "in_progress")
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
        logprobs = chat_logprobs(self._tokenizer, self._logprobs, self._num_top).content
        self._logprobs = []
        self.event("response.output_text.delta", **self._content_position(), delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(_new_id("rs"), [], [], "in_progress")
            self._add_text_item(item, item.content, ReasoningText(""))
        self._texts.append(text)
        self._logprobs = []
        self.event("response.reasoning_text.delta", **self._content_position(), delta=text)


class OutputItemsResponse(Response):
    """A response whose one choice is parsed into items."""

    def __init__(
        self,
        response: ResponseObject,
        jobs: Sequence[Job],
        body: ResponsesBody,
        parsing: OutputParsing,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(jobs)
        self._response = response
        self._num_logprobs = body.num_logprobs
        self._parser = ChoiceParser(parsing)
        self._writer = OutputItemWriter(parsing.new_call_id, tokenizer, max(body.num_logprobs, 0))
        self._finish_reason = ""

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        deltas = self._parser.feed(choice, text, output, self.generation.usage)
        self._writer.write(deltas, self._logprobs(choice, output))
        self._finish_reason = choice.finish_reason
        if choice.finish_reason:
            self._writer.end(choice.finish_reason != _CUT)

    def _logprobs(self, choice: Choice, output: pb.Output) -> list[TokenLogprob]:
        if self._num_logprobs < 0 or not output.has_token:
            return []
        return [TokenLogprob.of_output(output, choice.token_offset)]

    def _finished(self) -> ResponseObject:
        cut = self._finish_reason == _CUT
        return msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=self._writer.items,
            usage=ResponseUsage.of(self.generation.usage),
            completed_at=int(time.time()),
        )


class FullOutputItems(OutputItemsResponse, BodyResponse):
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        super().on_delta(choice, text, output)
        self.hold(text, self._num_logprobs)

    def body(self) -> Iterator[bytes]:
        return json_chunks(self._finished())


class StreamedOutputItems(OutputItemsResponse, EventStreamResponse):
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        if not self.started:
            self._writer.stream = self
            for state in ("created", "in_progress"):
                self._writer.large_event(f"response.{state}", response=self._response)
            self._start()
        super().on_delta(choice, text, output)

    def on_end(self, error: PdserveError | None) -> None:
        self._writer.settle()
        if error is None:
            response = self._finished()
            self._writer.large_event(f"response.{response.status}", response=response)
        elif self.started:
            failure = ResponseError(status_and_type(error)[1], str(error))
            items = self._writer.items
            response = msgspec.structs.replace(self._response, status="failed", error=failure, output=items)
            self._writer.large_event("response.failed", response=response)
        super().on_end(error)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
