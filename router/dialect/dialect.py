"""Dialect: all differences between the HTTP protocols. The endpoints know nothing else of a protocol.

    client ── body ──► parse ──► complete ──► prepare ──► jobs ──► nodes
    client ◄── JSON or events ◄── Response ◄── respond ◄── tokens ◄──┘

A new protocol is a file with a GenerateDialect and a line in router/http/app.py. A body that becomes a ChatBody gets
its jobs from ``prepare_chat`` of router/completions_api/chat_dialect.py, as in router/messages_api/dialect.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from pdserve.adapters.adapter import NO_ADAPTER
from router.dialect.operation import Operation
from router.dialect.responses import Response
from router.errors import OPENAI_ERRORS, ErrorFormat
from router.generation.job import GenerationOptions, Job
from router.service import ServedModel
from router.text.chat.output_parsing import OutputParsing
from router.text.stop_strings import Reasoned, StopStrings


class RequestBody(Protocol):
    """Fields that endpoints read of every body."""

    @property
    def model(self) -> str | None: ...

    @property
    def cache_salt(self) -> str: ...

    @property
    def priority(self) -> int: ...


class GenerateRequestBody(RequestBody, Protocol):
    @property
    def request_id(self) -> str: ...


BodyT = TypeVar("BodyT", bound=RequestBody)
GenerateBodyT = TypeVar("GenerateBodyT", bound=GenerateRequestBody)


class Dialect(ABC, Generic[BodyT]):
    """A protocol whose requests compute with a model."""

    name: ClassVar[str]  # label of metrics and logs
    trace_name: ClassVar[str]  # gen_ai.operation.name of OpenTelemetry, if it has one
    paths: ClassVar[Sequence[str]]
    operation: ClassVar[Operation]  # OpenAPI operation that all ``paths`` share
    errors: ClassVar[ErrorFormat] = OPENAI_ERRORS  # applies also to other paths that begin with one of ``paths``

    @abstractmethod
    def parse(self, data: bytes) -> BodyT:
        """Return the checked body. Called on a thread for large ones. Raises RequestError."""


class Prepared(msgspec.Struct, frozen=True):
    """A body made ready for the nodes."""

    jobs: Sequence[Job]
    stops: StopStrings
    continues_prompt: bool  # the output continues the prompt's text; a chat message begins a new text
    visible_special_tokens: tuple[str, ...] | None  # special tokens that become text; None: all
    parsing: OutputParsing | None  # parser of reasoning and tool calls; None: plain text

    def with_adapter(self, digest: str) -> Prepared:
        """Return the same prompts for an adapter of the model."""
        if digest == NO_ADAPTER:
            return self
        jobs = [replace(job, sampling=replace(job.sampling, adapter=digest)) for job in self.jobs]
        return replace(self, jobs=jobs)

    @property
    def new_reader(self) -> Callable[[], Reasoned] | None:
        """Find the end of the reasoning, if stop strings have to wait for it."""
        return self.parsing.new_parser if self.parsing and self.parsing.reasons and self.stops.first_letters else None


class GenerateDialect(Dialect[GenerateBodyT]):
    """A protocol whose answers are generated tokens."""

    async def complete(self, body: GenerateBodyT, owner: str) -> GenerateBodyT:
        """Return the body with the stored items of ``owner`` that it names. Raises RequestError."""
        return body

    @abstractmethod
    async def prepare(self, body: GenerateBodyT, model: ServedModel) -> Prepared:
        """Return prompts with sampling parameters, and the reading of the output.

        Raises RequestError, or Overloaded when no node is ready.
        """

    @abstractmethod
    def respond(
        self, body: GenerateBodyT, prepared: Prepared, model: ServedModel, options: GenerationOptions
    ) -> Response:
        """Return the writer of the answer, whole or as a stream."""
