"""The responses of completions and chats whose output is plain text: one JSON body, or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from io import StringIO
from typing import Any

from msgspec.structs import replace

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.generate_body import GenerateBody
from router.completions_api.response_encoders import DONE, FinishedChoice, ResponseEncoder
from router.completions_api.response_objects import TokenNames, prompt_logprobs
from router.dialect.events import Event
from router.dialect.json_pieces import lazy_numbers
from router.dialect.responses import BodyResponse, EventStreamResponse, Response
from router.errors import error_body
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.logprob_table import LogprobTable
from router.generation.prompt_scores import PromptScores
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage
from router.service import ServedModel


def make_encoder(
    kind: type[ResponseEncoder], body: GenerateBody, jobs: Sequence[Job], *, model: ServedModel, request_id: str
) -> ResponseEncoder:
    return kind(
        names=TokenNames(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        model=model.name,
        request_id=request_id,
        num_top=max(jobs[0].sampling.logprobs, 0),
        include_usage=bool(body.usage_in_stream.include_usage),
    )


class ChoicesResponse(Response):
    """A response of a completion or chat."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._encoder = encoder
        self._num_logprobs = jobs[0].sampling.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._return_token_ids = body.return_token_ids
        self._echo = body.echoes
        self._echoed_chat = body.echoed_text if body.echoes else ""

    def on_weights(self, weights: str) -> None:
        self._encoder.use_weights(weights)

    def _prompt_of(self, choice_index: int) -> int:
        return choice_index // self.jobs[0].sampling.n

    def _echo_text(self, choice_index: int) -> str:
        if self._echoed_chat or not self._echo:
            return self._echoed_chat
        return self.jobs[self._prompt_of(choice_index)].prompt.text or ""

    def _echoed_scores(self, prompt: int) -> PromptScores | None:
        if not self._echo or self._echoed_chat or self._num_logprobs < 0:
            return None
        return self.generation.runs[prompt].scores

    def _echo_logprobs(self, prompt: int) -> LogprobTable | None:
        scores = self._echoed_scores(prompt)
        return None if scores is None else scores.table(self.jobs[prompt].prompt.offsets)

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
            choice=choice,
            prompt=prompt,
            text=self._echo_text(choice.index) + self._texts[choice.index].getvalue(),
            token_ids=lazy_numbers(choice.token_ids) if self._return_token_ids else None,
            logprobs=[*echo, self._logprobs[choice.index]] if self._num_logprobs >= 0 else None,
        )

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._return_token_ids:
            fields["prompt_token_ids"] = lazy_numbers(self.jobs[index].prompt.unpacked())
        num_top = self._prompt_logprobs
        scores = self.generation.runs[index].scores
        if num_top is not None and scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._encoder.names, scores, num_top)
        return fields


class StreamedResponse(ChoicesResponse, EventStreamResponse):
    """Write a chunk per token."""

    def __init__(self, encoder: ResponseEncoder, body: GenerateBody, jobs: Sequence[Job]) -> None:
        super().__init__(encoder, body, jobs)
        self._include_usage = body.usage_in_stream.include_usage
        self._continuous_usage = self._include_usage and body.usage_in_stream.continuous_usage_stats
        self._usage_shown = Usage()  # usage in the newest chunk with text
        self._opened: set[int] = set()
        self._detailed = self._num_logprobs >= 0 or body.return_token_ids
        self._plain = not (self._detailed or self._continuous_usage)  # chunks have nothing but text, until the end

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        index = choice.index
        if index not in self._opened:
            self._open(index)
        if text and self._plain and not choice.finish_reason:
            self.write(Event("", self._encoder.text_chunk(index, text)))
        elif text or choice.finish_reason or self._detailed:
            self.write(Event("", self._chunk(choice, text, output)))
        if not self.started:
            self._start()

    def on_end(self, error: PdserveError | None) -> None:
        if error is None:
            if self._include_usage:
                self._append(Event("", self._encoder.usage_chunk(self.generation.usage)))
            self._append(DONE)
        elif self.started:  # an error event, and no [DONE]
            self._append(Event("", error_body(error)))
        super().on_end(error)

    def _open(self, index: int) -> None:
        """Write the chunks that precede a choice. They may be larger than the prompt."""
        self._opened.add(index)
        usage = self._usage_before()
        if self._return_token_ids:
            self.write_large("", partial(self._first_chunk, index, usage))
        elif opening := b"".join(self._first_chunk(index, usage)):
            self._append(Event("", opening))
        if self._echo_text(index) or self._echoed_scores(self._prompt_of(index)) is not None:
            self.write_large("", partial(self._echo_chunk, index, usage))

    def _first_chunk(self, index: int, usage: Usage | None) -> Iterator[bytes]:
        prompt_ids = self.jobs[self._prompt_of(index)].prompt.unpacked() if self._return_token_ids else None
        yield from self._encoder.first_chunk(index, prompt_ids, usage)

    def _echo_chunk(self, index: int, usage: Usage | None) -> Iterator[bytes]:
        table = self._echo_logprobs(self._prompt_of(index))
        yield from self._encoder.echo_chunk(index, self._echo_text(index), table, usage=usage)

    @property
    def _usage(self) -> Usage | None:
        """The usage so far, for each chunk; None: chunks have none."""
        return self.generation.usage if self._continuous_usage else None

    def _usage_before(self) -> Usage | None:
        """Return the usage for chunks before a choice's first token: that of the previous chunk."""
        usage = self._usage
        if usage is None:
            return None
        return replace(
            self._usage_shown,
            prompt_tokens=usage.prompt_tokens,
            image_tokens=usage.image_tokens,
            cached_tokens=usage.cached_tokens,
        )

    def _chunk(self, choice: Choice, text: str, output: pb.Output) -> bytes:
        if (usage := self._usage) is not None:
            self._usage_shown = replace(usage)
        if not self._detailed:
            return self._encoder.chunk(choice, text, usage=usage)
        tokens = token_ids = None
        if self._num_logprobs >= 0:
            tokens = [self._token_logprob(choice, output)] if output.has_token else []
        if self._return_token_ids:
            token_ids = [output.token_id] if output.has_token else []
        return self._encoder.chunk(choice, text, tokens, token_ids=token_ids, usage=usage)
