"""The response of /v1/responses, in full and as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.logprob_formats import chat_logprobs
from router.completions_api.parsed_chat import ChoiceParser
from router.completions_api.response_objects import ChatTokenLogprob
from router.completions_api.response_writers import BodyResponse, EventStreamResponse
from router.errors import status_and_type
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage
from router.responses_api.output_items import OutputItemWriter
from router.responses_api.output_objects import (
    IncompleteDetails,
    OutputItem,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from router.responses_api.request import ResponsesBody
from router.text.chat.output_parsing import OutputParsing
from router.text.tokenizer import Tokenizer

_CUT = "length"  # the finish reason of an incomplete response


def new_response(body: ResponsesBody, model: str, request_id: str) -> ResponseObject:
    """A response in progress, without output."""
    request = body.request
    return ResponseObject(
        id="resp_" + request_id,
        object="response",
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata,
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=None,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        background=False,
        store=False,
        temperature=body.temperature,
        text={"format": request.text.format or {"type": "text"}},
        tool_choice=request.tool_choice,
        tools=request.tools,
        top_logprobs=request.top_logprobs,
        top_p=body.top_p,
        truncation=request.truncation,
        user=body.user,
        status="in_progress",
        error=None,
        incomplete_details=None,
        output=[],
        usage=None,
    )


def _finished(response: ResponseObject, finish_reason: str, items: list[OutputItem], usage: Usage) -> ResponseObject:
    return msgspec.structs.replace(
        response,
        status="incomplete" if finish_reason == _CUT else "completed",
        incomplete_details=IncompleteDetails("max_output_tokens") if finish_reason == _CUT else None,
        output=items,
        usage=ResponseUsage.of(usage),
        completed_at=int(time.time()),
    )


class OutputItemParser:
    """Parse the one choice of a response into the items of ``writer``."""

    def __init__(self, body: ResponsesBody, parsing: OutputParsing, tokenizer: Tokenizer) -> None:
        self.finish_reason = ""
        self.writer = OutputItemWriter(lambda event: None, parsing.new_call_id)
        self._num_logprobs = body.num_logprobs
        self._parser = ChoiceParser(parsing)
        self._tokenizer = tokenizer

    def feed(self, choice: Choice, text: str, output: pb.Output, usage: Usage) -> None:
        deltas = self._parser.feed(choice, text, output, usage)
        self.writer.write(deltas, self._logprobs(choice, output))
        self.finish_reason = choice.finish_reason
        if choice.finish_reason:
            self.writer.end(choice.finish_reason != _CUT)

    def _logprobs(self, choice: Choice, output: pb.Output) -> list[ChatTokenLogprob]:
        if self._num_logprobs < 0 or not output.has_token:
            return []
        token = TokenLogprob.of_output(output, choice.token_offset)
        return chat_logprobs(self._tokenizer, [token], self._num_logprobs).content


class FullOutputItems(BodyResponse):
    def __init__(self, response: ResponseObject, jobs: Sequence[Job], parser: OutputItemParser) -> None:
        super().__init__(jobs)
        self._response = response
        self._parser = parser

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        self._parser.feed(choice, text, output, self.generation.usage)

    def body(self) -> bytes:
        items, usage = self._parser.writer.items, self.generation.usage
        return msgspec.json.encode(_finished(self._response, self._parser.finish_reason, items, usage))


class StreamedOutputItems(EventStreamResponse):
    def __init__(self, response: ResponseObject, jobs: Sequence[Job], parser: OutputItemParser) -> None:
        super().__init__(jobs)
        self._response = response
        self._parser = parser
        self._writer = parser.writer
        self._writer.write_event = self._write

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        if not self.started:
            for state in ("created", "in_progress"):
                self._writer.event(f"response.{state}", response=self._response)
            self._start()
        self._parser.feed(choice, text, output, self.generation.usage)

    def on_end(self, error: PdserveError | None) -> None:
        items = self._writer.items
        self._writer.settle()
        if error is None:
            response = _finished(self._response, self._parser.finish_reason, items, self.generation.usage)
            self._writer.event(f"response.{response.status}", response=response)
        elif self.started:
            failure = ResponseError(status_and_type(error)[1], str(error))
            response = msgspec.structs.replace(self._response, status="failed", error=failure, output=items)
            self._writer.event("response.failed", response=response)
        super().on_end(error)
