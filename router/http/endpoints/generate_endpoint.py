"""The endpoint of all dialects that generate: from an HTTP request to a generation and its response.

Raw ASGI, because there is a chunk per token. The status line of a stream waits for the first token, but at most
--sse-keep-alive seconds, so an earlier failure has a real status. A later failure is an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.errors import PdserveError
from router.dialect.answer_writer import AnswerWriter
from router.dialect.dialect import GenerateBodyT, GenerateDialect, Prepared
from router.gate.admission import Idle, RequestAdmission, RequestWork
from router.generation.generation import RequestGeneration
from router.generation.job import GenerationOptions, Job
from router.http.endpoints.body_reader import BodyReader
from router.http.endpoints.delivery import deadline, delivery
from router.http.endpoints.model_endpoint import ModelEndpoint
from router.http.endpoints.request_accounting import RequestAccounting
from router.service import Service


class GenerateEndpoint(ModelEndpoint[GenerateBodyT]):
    _dialect: GenerateDialect[GenerateBodyT]

    def __init__(self, service: Service, bodies: BodyReader, dialect: GenerateDialect[GenerateBodyT]) -> None:
        super().__init__(service, bodies, dialect)

    async def _respond(
        self,
        body: GenerateBodyT,
        writer: AnswerWriter,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        service = self._service
        dialect = self._dialect
        body = await dialect.complete(body, admission.owner)
        model = accounting.use_model(service.find(body.model))
        accounting.use_id(body.request_id)
        prepared = (await dialect.prepare(body, model)).with_adapter(model.adapter)
        options = self._options(body, prepared, admission, accounting)
        accounting.prepared()
        headers = [*admission.reserve(_work(prepared.jobs)), *accounting.id_headers]
        response = dialect.respond(body, prepared, model, options=options)
        generation = RequestGeneration(
            prepared.jobs, options, model.tokenizer, consumer=response, metrics=accounting.metrics
        )
        response.generation = generation
        idle = Idle(writer.keep_alive, lambda: response.keep_open(writer, headers))
        try:
            await admission.wait_for_slot(options.priority, options.remaining, disconnected, idle)
            accounting.admitted()
            disconnected.add_done_callback(lambda _: response.on_disconnect())
            with accounting.generating(generation, admission), deadline(generation), service.running(generation):
                await generation.prepare(model.fleet)
                await generation.start(model.fleet)
                async with delivery(options.remaining, options.request_id, options.log_fields):
                    return await response.deliver(writer, headers)
        except PdserveError as exc:
            if not response.begun:
                raise
            generation.fail(exc)  # an event of the stream
            return await response.deliver(writer, headers)
        finally:
            generation.close()

    def _options(
        self,
        body: GenerateBodyT,
        prepared: Prepared,
        admission: RequestAdmission,
        accounting: RequestAccounting,
    ) -> GenerationOptions:
        service = self._service
        return GenerationOptions(
            request_id=accounting.request_id,
            arrived=accounting.arrived,
            timeout=service.options.request_timeout,
            migrations=service.options.migrations,
            stops=prepared.stops,
            new_reader=prepared.new_reader,
            cache_salt=admission.cache_salt(body.cache_salt),
            priority=admission.clamp_priority(body.priority),
            client_tag=admission.client_tag,
            owner=admission.owner,
            continues_prompt=prepared.continues_prompt,
            visible_special_tokens=prepared.visible_special_tokens,
            names_nodes=service.options.dashboard,
            hint=accounting.hint,
            span=accounting.span,
        )


def _work(jobs: Sequence[Job]) -> RequestWork:
    """Return what the rate limits of a client count before the request runs."""
    return RequestWork(
        prompt_tokens=sum(job.prompt.num_tokens for job in jobs),
        max_output=sum(job.sampling.n * job.sampling.max_tokens for job in jobs),
        num_choices=sum(job.sampling.n for job in jobs),
    )
