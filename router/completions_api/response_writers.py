"""From deltas to bytes: a stream of server-sent events, or one body."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.response_formats import DONE, FinishedChoice, Format
from router.errors import error_body
from router.generation.choice import Choice
from router.generation.generation import RequestGeneration
from router.generation.job import Job
from router.generation.token_logprob import TokenLogprob

MAX_BUFFERED = 1024 * 1024  # bytes that a slow client may leave unread before it is cut off


class ResponseOptions(msgspec.Struct, frozen=True):
    """What the client asked to see. ``num_logprobs`` -1: none."""

    num_logprobs: int
    echo: bool
    return_token_ids: bool
    prompt_logprobs: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False


class Response(ABC):
    """Base of all. ``wake`` is set whenever there is something new to look at."""

    generation: RequestGeneration  # set before the first output arrives

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.wake = asyncio.Event()
        self.started = False  # there is a token, or the end without error
        self.ended = False
        self.gone = False  # the client is
        self.error: PdserveError | None = None

    @abstractmethod
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        """As Consumer has it."""

    def on_end(self, error: PdserveError | None) -> None:
        self.ended = True
        self.started = self.started or error is None
        self.error = error
        self.wake.set()

    def on_disconnect(self) -> None:
        """Nobody reads any more: the nodes are told at once."""
        self.gone = True
        self.generation.cancel()
        self.wake.set()

    def _prompt_of(self, choice_index: int) -> int:
        return choice_index // self.jobs[0].sampling.n

    def _echoed(self, options: ResponseOptions, choice_index: int) -> str:
        """The prompt's text, where it is to precede the output."""
        if not options.echo:
            return ""
        return self.jobs[self._prompt_of(choice_index)].prompt.text or ""

    def _echoed_tokens(self, options: ResponseOptions, prompt: int) -> list[TokenLogprob] | None:
        """The prompt's tokens, where their log-probabilities are to precede those of the output."""
        scores = self.generation.runs[prompt].scores
        if not options.echo or options.num_logprobs < 0 or scores is None:
            return None
        return scores.tokens(self.jobs[prompt].prompt.offsets)


class BodyResponse(Response):
    """One that is sent in one piece."""

    @abstractmethod
    def body(self) -> bytes:
        """All of it, as JSON; once it has ended without an error."""


class EventResponse(Response):
    """Writes server-sent events into a buffer that the connection empties."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._chunks: list[bytes] = []
        self._buffered = 0  # bytes
        self.cut_off: Callable[[], None] = lambda: None  # ends the connection, even while it waits for the client

    def take(self) -> bytes:
        """What was written since the last call."""
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
            self.cut_off()

    def _append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._buffered += len(chunk)


class WholeResponse(BodyResponse):
    """Collects the choices until all have ended."""

    def __init__(self, form: Format, options: ResponseOptions, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self.form = form
        self.options = options
        num_choices = sum(job.sampling.n for job in jobs)
        self._choices = [
            FinishedChoice(index, self._prompt_of(index), "", "", [], [] if options.num_logprobs >= 0 else None)
            for index in range(num_choices)
        ]
        self._texts: list[list[str]] = [[self._echoed(options, index)] for index in range(num_choices)]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        whole = self._choices[choice.index]
        self._texts[choice.index].append(text)
        whole.finish_reason = choice.finish_reason
        if output.has_token:
            whole.token_ids.append(output.token_id)
            if whole.logprobs is not None:
                at = choice.token_offset + len(self._echoed(self.options, choice.index))
                whole.logprobs.append(TokenLogprob.of_output(output, at))

    def body(self) -> bytes:
        for whole, texts in zip(self._choices, self._texts, strict=True):
            whole.text = "".join(texts)
        self._prepend_prompts()
        prompts = [job.prompt.unpacked().tolist() for job in self.jobs] if self.options.return_token_ids else None
        return self.form.whole(self._choices, self.generation.usage, prompts, self._prompt_logprobs())

    def _prepend_prompts(self) -> None:
        """To the log-probabilities of each choice, where that is asked for."""
        echoed = [self._echoed_tokens(self.options, prompt) for prompt in range(len(self.jobs))]
        for whole in self._choices:
            tokens = echoed[whole.prompt]
            if tokens is not None and whole.logprobs is not None:
                whole.logprobs = tokens + whole.logprobs

    def _prompt_logprobs(self) -> list[Any] | None:
        num_top = self.options.prompt_logprobs
        if num_top is None:
            return None
        scores = (run.scores for run in self.generation.runs)
        return [self.form.prompt_logprobs(found, num_top) for found in scores if found is not None]


class StreamResponse(EventResponse):
    """Writes a chunk per token."""

    def __init__(self, form: Format, options: ResponseOptions, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self.form = form
        self.options = options
        self._opened: set[int] = set()
        self._detailed = options.num_logprobs >= 0 or options.return_token_ids

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
            if self.options.include_usage:
                self._append(self.form.usage_chunk(self.generation.usage))
            self._append(DONE)
        elif self.started:
            self._append(b"data: " + error_body(error) + b"\n\n")
        super().on_end(error)

    def _open(self, index: int) -> None:
        """What precedes a choice. Not counted as buffered: it is as large as the prompt, however fast the client."""
        self._opened.add(index)
        job = self.jobs[self._prompt_of(index)]
        prompt_ids = job.prompt.unpacked().tolist() if self.options.return_token_ids else None
        self._chunks.append(self.form.first(index, prompt_ids))
        echoed = self._echoed(self.options, index)
        tokens = self._echoed_tokens(self.options, self._prompt_of(index))
        if echoed or tokens:
            self._chunks.append(self.form.chunk(index, echoed, "", tokens))

    def _chunk(self, choice: Choice, text: str, output: pb.Output) -> bytes:
        options = self.options
        usage = self.generation.usage if options.continuous_usage else None
        if not self._detailed and usage is None and not choice.finish_reason:
            return self.form.text_chunk(choice.index, text)
        if not self._detailed:
            return self.form.chunk(choice.index, text, choice.finish_reason, usage=usage)
        tokens = token_ids = None
        if options.num_logprobs >= 0:
            at = choice.token_offset + len(self._echoed(options, choice.index))
            tokens = [TokenLogprob.of_output(output, at)] if output.has_token else []
        if options.return_token_ids:
            token_ids = [output.token_id] if output.has_token else []
        return self.form.chunk(choice.index, text, choice.finish_reason, tokens, token_ids, usage)
