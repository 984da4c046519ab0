"""From output deltas to bytes: server-sent events, or one JSON body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import StringIO
from itertools import chain
from typing import Any

import msgspec

from pdserve.errors import PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.generate_body import GenerateBody
from router.completions_api.json_pieces import in_chunks, lazy_numbers
from router.completions_api.request_bodies import ChatBody
from router.completions_api.response_encoders import DONE, FinishedChoice, ResponseEncoder
from router.completions_api.response_objects import prompt_logprobs
from router.completions_api.wake import Wake
from router.errors import error_body
from router.generation.choice import Choice
from router.generation.generation import RequestGeneration
from router.generation.job import Job
from router.generation.logprob_table import LogprobTable
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage

MAX_HELD = 64 * 1024 * 1024  # bytes of text, token ids and log-probabilities of a response that is not streamed
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 20, 8  # in columns
PAUSE_BYTES = 64 * 1024  # written while the connection takes none; beyond, the nodes pause the request
_RESUME_BYTES = 16 * 1024  # left to write when the connection takes bytes again


class Response(ABC):
    """Base of all responses: the consumer of a generation. ``wake`` is set on every change."""

    generation: RequestGeneration  # set before the first output arrives

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.wake = Wake()
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

    def on_weights(self, weights: str) -> None:
        """See Consumer."""
        self.weights = weights  # most protocols have no field for it

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
    """A response that is sent after its end."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._held = 0  # bytes

    @abstractmethod
    def body(self) -> Iterator[bytes]:
        """The JSON body in pieces. Call it after the end without an error."""

    def hold(self, text: str, num_logprobs: int) -> None:
        """Count a token, and end the request beyond MAX_HELD."""
        self._held += len(text) + _TOKEN_BYTES + _ALTERNATIVE_BYTES * num_logprobs
        if self._held > MAX_HELD:
            remedy = "stream it, or lower n, max_tokens or the number of log-probabilities"
            self.generation.fail(RequestError(f"the response takes more than {MAX_HELD} bytes of memory; {remedy}"))


class EventStreamResponse(Response):
    """Server-sent events in a buffer, which the connection drains. While it does not, the nodes pause the request.

    Large events are encoded piece by piece, as the client reads them.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._large: deque[Iterator[bytes]] = deque()  # large events, and the chunks before each; sent before _chunks
        self._chunks: list[bytes] = []
        self._buffered = 0  # bytes
        self._sending = False  # the connection has not taken the bytes of the last ``take``
        self._paused = False

    @property
    def has_more(self) -> bool:
        """Whether another ``take`` returns bytes at once."""
        return bool(self._large)

    def take(self) -> bytes:
        """Return the buffer up to the next large event and remove it; then that event, a piece at a time."""
        self.wake.clear()
        self._sending = True
        while self._large:
            if piece := next(self._large[0], b""):
                return piece
            self._large.popleft()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        return data

    def sent(self) -> None:
        """The connection has taken the bytes of the last ``take``."""
        self._sending = False
        if self._paused and self._buffered <= _RESUME_BYTES:
            self._paused = False
            self.generation.set_paused(False)

    def _start(self) -> None:
        self.started = True
        self.wake.set()

    def write(self, chunk: bytes) -> None:
        self._append(chunk)
        self.wake.set()
        if self._sending and self._buffered > PAUSE_BYTES and not self._paused:
            self._paused = True
            self.generation.set_paused(True)

    def _append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._buffered += len(chunk)

    def write_large(self, make: Callable[[], Iterator[bytes]]) -> None:
        """Write an event of any size. It does not count as buffered: it does not exist yet."""
        self._large.append(in_chunks(chain(self._chunks, make())))
        self._chunks = []
        self.wake.set()


class ChoicesResponse(Response):
    """A response of a completion or chat."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._encoder = encoder
        self._num_logprobs = jobs[0].sampling.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._return_token_ids = body.return_token_ids
        self._echo = body.echoes
        self._echoed_chat = body.echoed_text if isinstance(body, ChatBody) and body.echoes else ""

    def on_weights(self, weights: str) -> None:
        self._encoder.use_weights(weights)

    def _prompt_of(self, choice_index: int) -> int:
        return choice_index // self.jobs[0].sampling.n

    def _echo_text(self, choice_index: int) -> str:
        if self._echoed_chat or not self._echo:
            return self._echoed_chat
        return self.jobs[self._prompt_of(choice_index)].prompt.text or ""

    def _echo_logprobs(self, prompt: int) -> LogprobTable | None:
        scores = self.generation.runs[prompt].scores
        if not self._echo or self._echoed_chat or self._num_logprobs < 0 or scores is None:
            return None
        return scores.table(self.jobs[prompt].prompt.offsets)

    def _token_logprob(self, choice: Choice, output: pb.Output) -> TokenLogprob:
        """The token's log-probability; its text begins behind the echo."""
        return TokenLogprob.of_output(output, choice.token_offset + len(self._echo_text(choice.index)))


class FullResponse(ChoicesResponse, BodyResponse):
    """Collect the choices until all have ended."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(encoder, body, jobs)
        self._texts = [StringIO() for _ in range(self.num_choices)]
        self._logprobs = [LogprobTable() for _ in self._texts]

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        self._add_text(choice, text, output)
        if output.has_token and self._num_logprobs >= 0:
            self._logprobs[choice.index].add(self._token_logprob(choice, output))
        self.hold(text, self._num_logprobs)

    def _add_text(self, choice: Choice, text: str, output: pb.Output) -> None:
        self._texts[choice.index].write(text)

    def body(self) -> Iterator[bytes]:
        choices: list[FinishedChoice] = []
        for prompt, run in enumerate(self.generation.runs):
            table = self._echo_logprobs(prompt)
            echo = [] if table is None else [table]
            choices += [self._finished(choice, prompt, echo) for choice in run.choices]
        prompts = [self._prompt_fields(prompt) for prompt in range(len(self.jobs))]
        return self._encoder.full_response(choices, self.generation.usage, prompts)

    def _finished(self, choice: Choice, prompt: int, echo: list[LogprobTable]) -> FinishedChoice:
        return FinishedChoice(
            choice,
            prompt,
            self._echo_text(choice.index) + self._texts[choice.index].getvalue(),
            lazy_numbers(choice.token_ids) if self._return_token_ids else None,
            [*echo, self._logprobs[choice.index]] if self._num_logprobs >= 0 else None,
        )

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._return_token_ids:
            fields["prompt_token_ids"] = lazy_numbers(self.jobs[index].prompt.unpacked())
        num_top, scores = self._prompt_logprobs, self.generation.runs[index].scores
        if num_top is not None and scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._encoder.names, scores, num_top)
        return fields


class StreamedResponse(ChoicesResponse, EventStreamResponse):
    """Write a chunk per token."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(encoder, body, jobs)
        self._include_usage = body.usage_in_stream.include_usage
        self._continuous_usage = self._include_usage and body.usage_in_stream.continuous_usage_stats
        self._opened: set[int] = set()
        self._detailed = self._num_logprobs >= 0 or body.return_token_ids
        self._plain = not (self._detailed or self._continuous_usage)  # chunks have nothing but text, until the end

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        index = choice.index
        if index not in self._opened:
            self._open(index)
        if text or choice.finish_reason or self._detailed:
            self.write(self._chunk(choice, text, output))
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
        """Write the chunks that precede a choice. They may be larger than the prompt."""
        self._opened.add(index)
        if self._echo or self._return_token_ids:
            self.write_large(partial(self._opening, index))
        else:
            self._chunks += self._encoder.first_chunk(index, None, self._usage_before)

    def _opening(self, index: int) -> Iterator[bytes]:
        prompt = self._prompt_of(index)
        prompt_ids = self.jobs[prompt].prompt.unpacked() if self._return_token_ids else None
        yield from self._encoder.first_chunk(index, prompt_ids, self._usage_before)
        text, table = self._echo_text(index), self._echo_logprobs(prompt)
        if text or table:
            yield from self._encoder.echo_chunk(index, text, table, self._usage_before)

    @property
    def _usage(self) -> Usage | None:
        """The usage so far, for each chunk; None: chunks have none."""
        return self.generation.usage if self._continuous_usage else None

    @property
    def _usage_before(self) -> Usage | None:
        """The same for chunks before a choice's first token."""
        usage = self._usage
        return None if usage is None else msgspec.structs.replace(usage, completion_tokens=0, reasoning_tokens=0)

    def _chunk(self, choice: Choice, text: str, output: pb.Output) -> bytes:
        if self._plain and not choice.finish_reason:
            return self._encoder.text_chunk(choice.index, text)
        usage = self._usage
        if not self._detailed:
            return self._encoder.chunk(choice, text, usage=usage)
        tokens = token_ids = None
        if self._num_logprobs >= 0:
            tokens = [self._token_logprob(choice, output)] if output.has_token else []
        if self._return_token_ids:
            token_ids = [output.token_id] if output.has_token else []
        return self._encoder.chunk(choice, text, tokens, token_ids, usage)
