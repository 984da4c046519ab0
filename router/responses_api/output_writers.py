"""The response of /v1/responses, in full and as a stream of events:

response.created, response.in_progress
  events of each item (item_writer.py)
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from pdserve.errors import PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.sampling_params import SamplingParams
from router.completions_api.parsed_chat import ChoiceParser
from router.dialect.json_pieces import json_chunks
from router.dialect.responses import BodyResponse, EventStreamResponse, Response
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.token_logprob import TokenLogprob
from router.responses_api.compaction import encode_summary
from router.responses_api.input_items import new_id
from router.responses_api.item_writer import OutputItemWriter
from router.responses_api.output_objects import (
    CompactedResponse,
    CompactionItem,
    IncompleteDetails,
    OutputMessage,
    ReasoningConfig,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    TextConfig,
)
from router.responses_api.request import ResponsesBody
from router.text.chat.output_parsing import OutputParsing
from router.text.tokenizer import Tokenizer

_CUT = "length"  # the finish reason of an incomplete response
# Fields that a response repeats from its request.
_REPEATED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "top_logprobs",
    "truncation",
    "safety_identifier",
    "prompt_cache_key",
    "background",
)
_FORMAT = {"name": None, "description": None, "schema": None, "strict": False}  # defaults of a JSON schema format
_FUNCTION = {"type": "function", "name": None, "description": None, "parameters": None, "strict": None}


def new_response(
    body: ResponsesBody,
    model: str,
    response_id: str,
    sampling: SamplingParams,
    stored: bool,
    warnings: Sequence[str] = (),
) -> ResponseObject:
    """A response in progress, without output. ``warnings`` are added to those of the body."""
    request = body.request
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        **{name: getattr(request, name) for name in _REPEATED},
        parallel_tool_calls=body.parallel_tool_calls,
        conversation=None,
        prompt=None,
        reasoning=ReasoningConfig(request.reasoning.effort, request.reasoning.summary),
        service_tier="default",
        store=stored,
        temperature=sampling.temperature,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        text=TextConfig(_shown_format(request.text.format or {}), request.text.verbosity or "medium"),
        tool_choice=_shown_tool_choice(request.tool_choice),
        tools=[_shown_tool(tool) for tool in body.offered.tools],
        top_p=sampling.top_p,
        user=body.user,
        status="in_progress",
        completed_at=None,
        error=None,
        incomplete_details=None,
        output=[],
        usage=None,
        warnings=[*body.warnings, *warnings] or UNSET,
    )


def _shown_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form or {"type": "text"}
    return {**_FORMAT, **form, "strict": bool(form.get("strict"))}


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with all fields of a function."""
    return {**_FUNCTION, **tool} if tool.get("type") == "function" else tool


def _shown_tool_choice(tool_choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        return {"mode": "auto", **tool_choice}
    return tool_choice


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
        self.response = response  # response as it began; complete after the end
        self.on_final: Callable[[ResponseObject], None] = lambda response: None
        self._num_logprobs = jobs[0].sampling.logprobs
        self._parser = ChoiceParser(parsing)
        self._writer = OutputItemWriter(
            parsing.new_call_id, tokenizer, max(self._num_logprobs, 0), origins=body.offered.origins
        )
        self._finish_reason = ""

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        deltas = self._parser.feed(choice, text, output, usage=self.generation.usage)
        self._writer.write(deltas, self._logprobs(choice, output))
        self._finish_reason = choice.finish_reason
        if choice.finish_reason:
            self._writer.end(choice.finish_reason != _CUT)

    def on_end(self, error: PdserveError | None) -> None:
        if error is None or self.started:
            self._set_final(self._finished() if error is None else self._failed(error))
        super().on_end(error)

    def _logprobs(self, choice: Choice, output: pb.Output) -> list[TokenLogprob]:
        if self._num_logprobs < 0 or not output.has_token:
            return []
        return [TokenLogprob.of_output(output, choice.token_offset)]

    def _write_start(self) -> None:
        for state in ("created", "in_progress"):
            self._writer.large_event(f"response.{state}", response=self.response)

    def _set_final(self, response: ResponseObject) -> None:
        """Write the last event of a response that was not cancelled."""
        self.response = response
        if response.status != "cancelled":
            self._writer.large_event(f"response.{response.status}", response=response)
        self.on_final(response)

    def _finished(self) -> ResponseObject:
        cut = self._finish_reason == _CUT
        details = IncompleteDetails("max_output_tokens") if cut else None
        ended = None if cut else int(time.time())
        return self._ended("incomplete" if cut else "completed", incomplete_details=details, completed_at=ended)

    def _failed(self, error: PdserveError) -> ResponseObject:
        return self._ended("failed", error=ResponseError("server_error", str(error)))

    def _ended(self, status: ResponseStatus, **fields: Any) -> ResponseObject:
        self._writer.abandon()
        usage = ResponseUsage.of(self.generation.usage)
        items = self._writer.items
        return msgspec.structs.replace(self.response, status=status, output=items, usage=usage, **fields)


class FullOutputItems(OutputItemsResponse, BodyResponse):
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        super().on_delta(choice, text, output)
        self.hold(text, self._num_logprobs)

    def body(self) -> Iterator[bytes]:
        return json_chunks(self.response)


class CompactedItems(FullOutputItems):
    """The summary of a conversation as an item."""

    def on_end(self, error: PdserveError | None) -> None:
        if error is None and self._finish_reason == _CUT:
            error = RequestError("the summary does not fit into the context; compact a shorter conversation", "input")
        elif error is None and not self._summary:
            error = PdserveError("the model wrote no summary; send the request again, or the conversation itself")
        super().on_end(error)

    def body(self) -> Iterator[bytes]:
        response = self.response
        assert response.usage is not None
        items = [CompactionItem(new_id("cmp"), encode_summary(self._summary))]
        compacted = CompactedResponse(
            id=response.id, created_at=response.created_at, output=items, usage=response.usage
        )
        return json_chunks(compacted)

    @property
    def _summary(self) -> str:
        messages = (item for item in self._writer.items if isinstance(item, OutputMessage))
        return "".join(part.text for message in messages for part in message.content).strip()


class StreamedOutputItems(OutputItemsResponse, EventStreamResponse):
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        self._open()
        if not self.started:
            self._start()
        super().on_delta(choice, text, output)

    def on_end(self, error: PdserveError | None) -> None:
        if self.started:
            self._open()
        super().on_end(error)

    def _open(self) -> None:
        """Write the first events. Idempotent."""
        if self._writer.stream is None:
            self._writer.stream = self
            self._write_start()
