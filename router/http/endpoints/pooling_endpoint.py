"""Embeddings, scores and rankings: from an HTTP request to vectors of prefill nodes and its response."""

from __future__ import annotations

import asyncio
import time

from pdserve.errors import RequestError
from pdserve.logs import request_fields
from router.dialect.answer_writer import AnswerWriter
from router.dialect.dialect import BodyT
from router.dialect.json_pieces import json_chunks
from router.errors import ClientDisconnected
from router.gate.admission import RequestAdmission, RequestWork
from router.http.endpoints.body_reader import BodyReader
from router.http.endpoints.delivery import delivery
from router.http.endpoints.model_endpoint import ModelEndpoint
from router.http.endpoints.request_accounting import RequestAccounting
from router.pooling.answers import AnswerFields
from router.pooling.dialects import PoolingDialect
from router.pooling.run import PoolingOptions, PoolingRun
from router.service import Service


class PoolingEndpoint(ModelEndpoint[BodyT]):
    _dialect: PoolingDialect[BodyT]

    def __init__(self, service: Service, bodies: BodyReader, dialect: PoolingDialect[BodyT]) -> None:
        super().__init__(service, bodies, dialect)

    async def _respond(
        self,
        body: BodyT,
        writer: AnswerWriter,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        service = self._service
        dialect = self._dialect
        model = accounting.use_model(service.find(body.model))
        if model.adapter:
            raise RequestError(f"{model.name!r} is an adapter, which generates only; use {model.base!r}", "model")
        limits = model.fleet.limits(dialect.tasks)
        prompts = await dialect.prompts(body, model.encoder, limits)
        dimensions = dialect.dimensions(body)
        options = PoolingOptions(
            request_id=accounting.request_id,
            task=limits.task,
            arrived=accounting.arrived,
            timeout=service.options.request_timeout,
            dimensions=dimensions,
            migrations=service.options.migrations,
            cache_salt=admission.cache_salt(body.cache_salt),
            priority=admission.clamp_priority(body.priority),
            client_tag=admission.client_tag,
            span=accounting.span,
        )
        work = RequestWork(sum(prompt.num_tokens for prompt in prompts))
        accounting.prepared()
        headers = [*admission.reserve(work), *accounting.id_headers]
        await admission.wait_for_slot(options.priority, options.remaining, disconnected)
        accounting.admitted()
        run = PoolingRun(prompts, options, model.fleet, metrics=accounting.metrics)
        disconnected.add_done_callback(lambda _: run.fail(ClientDisconnected()))
        try:
            with service.running(run):
                vectors = await run.vectors()
        finally:
            accounting.computed(run.usage)
            admission.record_output(0, run.usage.cached_tokens)
        fields = AnswerFields(
            model=model.name,
            request_id=options.request_id,
            created=int(time.time()),
            task=limits.task,
            weights=run.weights or "",
        )
        answer = await asyncio.to_thread(dialect.answer, body, vectors, run.usage, fields)
        async with delivery(options.remaining, options.request_id, request_fields(options.request_id)):
            await writer.send_json(json_chunks(answer), headers, disconnected.done)
        return "ok"
