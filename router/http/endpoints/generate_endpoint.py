"""The endpoint of all dialects that generate: from an HTTP request to a generation and its response.

Raw ASGI, because there is a chunk per token. The status line waits for the first token, so an earlier failure has a
real status. A later failure is an event.
"""

from __future__ import annotations

import asyncio

from pdserve.errors import DeadlineExceeded
from router.dialect.answer_writer import AnswerWriter
from router.dialect.dialect import GenerateBodyT, GenerateDialect
from router.gate.admission import RequestAdmission, RequestWork
from router.generation.generation import RequestGeneration
from router.generation.job import GenerationOptions
from router.http.endpoints.body_reader import BodyReader
from router.http.endpoints.delivery import delivery
from router.http.endpoints.model_endpoint import ModelEndpoint
from router.http.endpoints.request_accounting import RequestAccounting
from router.service import Service

_DEADLINE_GRACE = 0.5  # seconds that nodes get to end a request by its deadline before the router does


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
        service, dialect = self._service, self._dialect
        body = await dialect.complete(body, admission.owner)
        model = accounting.use_model(service.find(body.model))
        accounting.use_id(body.request_id)
        prepared = await dialect.prepare(body, model, service.options.max_logprobs)
        options = GenerationOptions(
            request_id=accounting.request_id,
            arrived=accounting.arrived,
            timeout=service.options.request_timeout,
            migrations=service.options.migrations,
            stops=prepared.stops,
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
        work = RequestWork(
            prompt_tokens=sum(job.prompt.num_tokens for job in prepared.jobs),
            max_output=sum(job.sampling.n * job.sampling.max_tokens for job in prepared.jobs),
            num_choices=sum(job.sampling.n for job in prepared.jobs),
        )
        accounting.prepared()
        headers = await admission.wait_for_slot(options.priority, work, options.remaining, disconnected=disconnected)
        accounting.admitted()
        headers += accounting.id_headers
        response = dialect.respond(body, prepared, model, options=options)
        generation = RequestGeneration(
            prepared.jobs, options, model.tokenizer, consumer=response, metrics=accounting.metrics
        )
        response.generation = generation
        await generation.prepare(model.fleet)
        disconnected.add_done_callback(lambda _: response.on_disconnect())
        loop = asyncio.get_running_loop()
        deadline = loop.call_at(loop.time() + options.remaining + _DEADLINE_GRACE, _expire, generation)
        try:
            with service.running(generation):
                await generation.start(model.fleet)
                async with delivery(options.remaining, options.request_id, options.log_fields):
                    return await response.deliver(writer, headers)
        finally:
            deadline.cancel()
            generation.close()
            accounting.generated(generation)
            admission.record_output(generation.usage.completion_tokens, generation.usage.cached_tokens)


def _expire(generation: RequestGeneration) -> None:
    timeout = generation.options.timeout
    generation.fail(DeadlineExceeded(f"the request exceeded its time limit of {timeout:g} s; request fewer tokens"))
