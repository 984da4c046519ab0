"""/v1/embeddings, /v1/score and /v1/rerank: from an HTTP request to vectors of prefill nodes and its response."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Send

from pdserve.logs import request_fields
from router.completions_api.json_pieces import json_chunks
from router.errors import ClientDisconnected
from router.fleet.fleet import ModelLimits
from router.fleet.policy import EMBED, POOLING
from router.gate.admission import RequestAdmission, RequestWork
from router.http.delivery import delivery, send_pieces
from router.http.model_endpoint import ModelEndpoint
from router.http.request_accounting import RequestAccounting
from router.pooling.answers import AnswerFields, make_answer
from router.pooling.prompts import embedding_prompts, pair_prompts
from router.pooling.request_bodies import EmbeddingBody, PairBody, PoolingBody
from router.pooling.run import PoolingOptions, PoolingRun
from router.service import ServedModel
from router.text.prompt import Prompt


class PoolingEndpoint(ModelEndpoint[PoolingBody]):
    async def _respond(
        self,
        body: PoolingBody,
        send: Send,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        service = self._service
        model = service.find(body.model)
        accounting.model = model.name
        limits = model.fleet.limits((EMBED,) if isinstance(body, EmbeddingBody) else POOLING)
        prompts = await _prompts(body, model, limits)
        dimensions = (isinstance(body, EmbeddingBody) and body.dimensions) or 0
        options = PoolingOptions(
            request_id=accounting.request_id,
            task=limits.task,
            arrived=accounting.arrived,
            timeout=service.options.request_timeout,
            vector_size=dimensions or limits.vector_size,
            dimensions=dimensions,
            migrations=service.options.migrations,
            cache_salt=admission.cache_salt(body.cache_salt),
            priority=admission.clamp_priority(body.priority),
            client_tag=admission.client_tag,
            span=accounting.span,
        )
        work = RequestWork(sum(prompt.num_tokens for prompt in prompts))
        accounting.prepared()
        headers = await admission.wait_for_slot(options.priority, work, options.remaining, disconnected)
        accounting.admitted()
        headers += accounting.id_headers
        run = PoolingRun(prompts, options, model.fleet, service.metrics)
        disconnected.add_done_callback(lambda _: run.fail(ClientDisconnected()))
        try:
            with service.running(run):
                vectors = await run.vectors()
        finally:
            accounting.computed(run.usage, None)
            admission.record_output(0, run.usage.cached_tokens)
        fields = AnswerFields(model.name, options.request_id, int(time.time()), limits.task, run.weights or "")
        answer = await asyncio.to_thread(make_answer, body, vectors, run.usage, fields)
        async with delivery(options.remaining, options.request_id, request_fields(options.request_id)):
            await send_pieces(send, json_chunks(answer), headers, service.turns, disconnected.done)
        return "ok"


async def _prompts(body: PoolingBody, model: ServedModel, limits: ModelLimits) -> list[Prompt]:
    if isinstance(body, EmbeddingBody):
        return await embedding_prompts(body, model.encoder, limits)
    assert isinstance(body, PairBody)
    return await pair_prompts(body, model.encoder, limits)
