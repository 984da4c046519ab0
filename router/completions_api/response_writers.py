"""From output deltas to bytes: server-sent events, or one JSON body."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.request_bodies import CompletionBody, GenerateBody
from router.completions_api.response_encoders import DONE, FinishedChoice, ResponseEncoder
from router.completions_api.response_objects import prompt_logprobs
from router.errors import error_body
from router.generation.choice import Choice
from router.generation.generation import RequestGeneration
from router.generation.job import Job
from router.generation.token_logprob import TokenLogprob

MAX_BUFFERED = 1024 * 1024  # bytes; a client that leaves more unread is disconnected


class Response(ABC):
    """Base of all responses: the consumer of a generation. ``wake`` is set on every change."""

    generation: RequestGeneration  # set before the first output arrives

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.wake = asyncio.Event()
        self.started = False  # a token, or the end without an error, has arrived
        self.ended = False
        self.disconnected = False
        self.error: PdserveError | None = None

    @property
    def num_choices(self) -> int:
        return sum(job.sampling.n for job in self.jobs)

    @abstractmethod
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        """See Consumer."""

    def on_end(self, error: PdserveError | None) -> None:
        self.ended = True
        self.started = self.started or error is None
        self.error = error
        self.wake.set()

    def on_disconnect(self) -> None:
        """The client has disconnected: cancel the request at its nodes."""
        self.disconnected = True
        self.generation.cancel()
        self.wake.set()


class BodyResponse(Response):
    """A response in one piece."""

    @abstractmethod
    def body(self) -> bytes:
        """The JSON body. Call it after the end without an error."""


class EventStreamResponse(Response):
    """Server-sent events in a buffer, which the connection drains."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._chunks: list[bytes] = []
        self._buffered = 0  # bytes
        self.disconnect: Callable[[], None] = lambda: None  # closes the connection, even during a blocked write

    def take(self) -> bytes:
        """Return and clear the buffer."""
        self.wake.clear()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        return data

    def _start(self) -> None:
        self.started = True
        self.wake.set()

    def _write(self, chunk: bytes) -> None:
        self._append(chunk)
        self.wake.set()
        if self._buffered > MAX_BUFFERED:
            self.generation.cancel()
            self.disconnect()

    def _append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._buffered += len(chunk)


class ChoicesResponse(Response):
    """A response of a completion or chat."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._encoder = encoder
        self._num_logprobs = body.num_logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._return_token_ids = body.return_token_ids
        self._echo = isinstance(body, CompletionBody) and body.echo

    def _prompt_of(self, choice_index: int) -> int:
        return choice_index // self.jobs[0].sampling.n

    def _echo_text(self, choice_index: int) -> str:
        return self.jobs[self._prompt_of(choice_index)].prompt.text or "" if self._echo else ""

    def _echo_logprobs(self, prompt: int) -> list[TokenLogprob] | None:
        scores = self.generation.runs[prompt].scores
        if not self._echo or self._num_logprobs < 0 or scores is None:
            return None
        return scores.tokens(self.jobs[prompt].prompt.offsets)

    def _token_logprob(self, choice: Choice, output: pb.Output) -> TokenLogprob:
        """The token's log-probability; its text begins behind the echo."""
        return TokenLogprob.of_output(output, choice.token_offset + len(self._echo_text(choice.index)))


class FullResponse(ChoicesResponse, BodyResponse):
    """Collect the choices until all have ended."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(encoder, body, jobs)
        self._texts = [[self._echo_text(index)] for index in range(self.num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._texts]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        self._texts[choice.index].append(text)
        if output.has_token and self._num_logprobs >= 0:
            self._logprobs[choice.index].append(self._token_logprob(choice, output))

    def body(self) -> bytes:
        choices: list[FinishedChoice] = []
        for prompt, run in enumerate(self.generation.runs):
            echo = self._echo_logprobs(prompt) or []
            choices += [self._finished(choice, prompt, echo) for choice in run.choices]
        prompts = [self._prompt_fields(prompt) for prompt in range(len(self.jobs))]
        return self._encoder.full_response(choices, self.generation.usage, prompts)

    def _finished(self, choice: Choice, prompt: int, echo: list[TokenLogprob]) -> FinishedChoice:
        return FinishedChoice(
            choice.index,
            prompt,
            "".join(self._texts[choice.index]),
            choice.finish_reason,
            choice.token_ids.tolist() if self._return_token_ids else UNSET,
            echo + self._logprobs[choice.index] if self._num_logprobs >= 0 else None,
        )

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._return_token_ids:
            fields["prompt_token_ids"] = self.jobs[index].prompt.unpacked().tolist()
        num_top, scores = self._prompt_logprobs, self.generation.runs[index].scores
        if num_top is not None and scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._encoder.tokenizer, scores, num_top)
        return fields


class StreamedResponse(ChoicesResponse, EventStreamResponse):
    """Write a chunk per token."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(encoder, body, jobs)
        self._include_usage = body.stream_options.include_usage
        self._continuous_usage = self._include_usage and body.stream_options.continuous_usage_stats
        self._opened: set[int] = set()
        self._detailed = body.num_logprobs >= 0 or body.return_token_ids

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        index = choice.index
        if index not in self._opened:
            self._open(index)
        if text or choice.finish_reason or self._detailed:
            self._write(self._chunk(choice, text, output))
        if not self.started:
            self._start()

    def on_end(self, error: PdserveError | None) -> None:
        if error is None:
            if self._include_usage:
                self._append(self._encoder.usage_chunk(self.generation.usage))
            self._append(DONE)
        elif self.started:  # an error event, and no [DONE]
            self._append(b"data: " + error_body(error) + b"\n\n")
        super().on_end(error)

    def _open(self, index: int) -> None:
        """Write the chunks that precede a choice. They are as large as the prompt, so they do not count as buffered."""
        self._opened.add(index)
        job = self.jobs[self._prompt_of(index)]
        prompt_ids = job.prompt.unpacked().tolist() if self._return_token_ids else None
        self._chunks.append(self._encoder.first_chunk(index, prompt_ids))
        text = self._echo_text(index)
        tokens = self._echo_logprobs(self._prompt_of(index))
        if text or tokens:
            self._chunks.append(self._encoder.chunk(index, text, "", tokens))

    def _chunk(self, choice: Choice, text: str, output: pb.Output) -> bytes:
        usage = self.generation.usage if self._continuous_usage else None
        if not self._detailed and usage is None and not choice.finish_reason:
            return self._encoder.text_chunk(choice.index, text)
        if not self._detailed:
            return self._encoder.chunk(choice.index, text, choice.finish_reason, usage=usage)
        tokens = token_ids = None
        if self._num_logprobs >= 0:
            tokens = [self._token_logprob(choice, output)] if output.has_token else []
        if self._return_token_ids:
            token_ids = [output.token_id] if output.has_token else []
        return self._encoder.chunk(choice.index, text, choice.finish_reason, tokens, token_ids, usage)
