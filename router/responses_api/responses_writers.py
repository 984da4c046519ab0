"""The response object of /v1/responses, whole and as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.chat_responses import ReadChoice
from router.completions_api.logprob_formats import chat_logprobs
from router.completions_api.response_writers import BodyResponse, EventResponse, Response
from router.errors import status_and_type
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage
from router.responses_api.output_items import ItemWriter
from router.responses_api.request import ItemsBody
from router.text.chat.output_reading import OutputReading
from router.text.tokenizer import Tokenizer

Fields = dict[str, Any]
_CUT_SHORT = {"length": "max_output_tokens"}


class ResponseObject:
    """What a response says beside its output."""

    def __init__(self, body: ItemsBody, model: str, request_id: str) -> None:
        request = body.request
        self._fields: Fields = {
            "id": "resp_" + request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "background": False,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": request.text.format or {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "top_p": body.top_p,
            "truncation": request.truncation,
            "user": body.user,
        }

    def to_json(self, status: str, items: Sequence[Fields] = (), **fields: Any) -> Fields:
        state = {"status": status, "error": None, "incomplete_details": None, "output": items, "usage": None}
        return {**self._fields, **state, **fields}

    def ended(self, finish_reason: str, items: Sequence[Fields], usage: Usage) -> Fields:
        fields = {"usage": usage_json(usage), "completed_at": int(time.time())}
        why = _CUT_SHORT.get(finish_reason)
        if why is not None:
            return self.to_json("incomplete", items, **fields, incomplete_details={"reason": why})
        return self.to_json("completed", items, **fields)


def usage_json(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Output:
    """The one choice of a response as items."""

    def __init__(self, body: ItemsBody, reading: OutputReading, tokenizer: Tokenizer, writer: ItemWriter) -> None:
        self.writer = writer
        self._num_logprobs = body.num_logprobs
        self._read = ReadChoice(reading)
        self._tokenizer = tokenizer

    def feed(self, response: Response, choice: Choice, text: str, output: pb.Output) -> None:
        pieces = self._read.feed(choice, text, output, response.generation.usage)
        self.writer.write(pieces, self._logprobs(choice, output))
        if choice.finish_reason:
            self.writer.end(choice.finish_reason not in _CUT_SHORT)

    def _logprobs(self, choice: Choice, output: pb.Output) -> list[Fields]:
        if self._num_logprobs < 0 or not output.has_token:
            return []
        token = TokenLogprob.of_output(output, choice.token_offset)
        entries: list[Fields] = chat_logprobs(self._tokenizer, [token], self._num_logprobs)["content"]
        return entries


class ItemsWhole(BodyResponse):
    def __init__(
        self, head: ResponseObject, body: ItemsBody, jobs: Sequence[Job], reading: OutputReading, tokenizer: Tokenizer
    ) -> None:
        super().__init__(jobs)
        self._head = head
        self._output = _Output(body, reading, tokenizer, ItemWriter(lambda event: None, reading.new_call_id))
        self._finish_reason = ""

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        self._output.feed(self, choice, text, output)
        self._finish_reason = choice.finish_reason

    def body(self) -> bytes:
        items = self._output.writer.items
        return msgspec.json.encode(self._head.ended(self._finish_reason, items, self.generation.usage))


class ItemsStream(EventResponse):
    def __init__(
        self, head: ResponseObject, body: ItemsBody, jobs: Sequence[Job], reading: OutputReading, tokenizer: Tokenizer
    ) -> None:
        super().__init__(jobs)
        self._head = head
        self._writer = ItemWriter(self._write, reading.new_call_id)
        self._output = _Output(body, reading, tokenizer, self._writer)
        self._finish_reason = ""

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        if not self.started:
            for state in ("created", "in_progress"):
                self._writer.event(f"response.{state}", response=self._head.to_json("in_progress"))
            self._start()
        self._output.feed(self, choice, text, output)
        self._finish_reason = choice.finish_reason

    def on_end(self, error: PdserveError | None) -> None:
        items = self._writer.items
        self._writer.settle()
        if error is None:
            answer = self._head.ended(self._finish_reason, items, self.generation.usage)
            self._writer.event(f"response.{answer['status']}", response=answer)
        elif self.started:
            told = {"code": status_and_type(error)[1], "message": str(error)}
            self._writer.event("response.failed", response=self._head.to_json("failed", items, error=told))
        super().on_end(error)
