"""Completions, chats, responses and messages: from an HTTP request to a generation and its response.

Raw ASGI, because there is a chunk per token. The status line waits for the first token, so an earlier failure has a
real status. A later failure is an error event without [DONE].
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Send

from pdserve.errors import DeadlineExceeded
from router.completions_api.generate_body import GenerateBody
from router.completions_api.jobs import add_echo, encode_prompts, make_job
from router.completions_api.response_writers import BodyResponse, EventStreamResponse, Response
from router.completions_api.token_params import check_logprobs, named_tokens
from router.fleet.policy import GENERATE
from router.gate.admission import RequestAdmission, RequestWork
from router.gate.rate_limits import Headers
from router.generation.generation import RequestGeneration
from router.generation.job import GenerationOptions, Job
from router.http.delivery import delivery, send_body, send_stream
from router.http.model_endpoint import ModelEndpoint
from router.http.request_accounting import RequestAccounting
from router.http.response_factory import (
    make_response,
    output_grammar,
    select_output_parsing,
    thinking,
    visible_special_tokens,
)
from router.service import ServedModel
from router.text.chat.output_parsing import OutputParsing
from router.text.stop_strings import build_stop_strings

_DEADLINE_GRACE = 0.5  # seconds that nodes get to end a request by its deadline before the router does


class GenerateEndpoint(ModelEndpoint[GenerateBody]):
    async def _respond(
        self,
        body: GenerateBody,
        send: Send,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        service = self._service
        model = service.find(body.model)
        accounting.model = model.name
        accounting.use_id(body.request_id)
        limits = model.fleet.limits((GENERATE,))
        check_logprobs(body, limits.vocab_size, service.options.max_logprobs)
        prompts = await encode_prompts(body, model.encoder, limits)
        grammar = await output_grammar(model, body, prompts[0])
        await model.grammars.check(grammar)
        constraints = {"grammar": grammar.text, **await named_tokens(body, model.encoder)}
        prompts = await add_echo(prompts, body, model.encoder)
        jobs = [
            make_job(prompt, body, limits, {**constraints, **thinking(model, body, prompt)}, model.defaults)
            for prompt in prompts
        ]
        parsing = select_output_parsing(model, body, prompts[0])
        options = GenerationOptions(
            request_id=accounting.request_id,
            arrived=accounting.arrived,
            timeout=service.options.request_timeout,
            migrations=service.options.migrations,
            stops=await build_stop_strings(body.stops, body.include_stop_str_in_output or body.no_stop_trim),
            cache_salt=admission.cache_salt(body.cache_salt),
            priority=admission.clamp_priority(body.priority),
            client_tag=admission.client_tag,
            owner=admission.owner,
            continues_prompt=body.continues_prompt,
            visible_special_tokens=visible_special_tokens(body, parsing),
            names_nodes=service.options.dashboard,
            span=accounting.span,
        )
        work = RequestWork(
            prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
            max_output=sum(job.sampling.n * job.sampling.max_tokens for job in jobs),
            num_choices=sum(job.sampling.n for job in jobs),
        )
        accounting.prepared()
        headers = await admission.wait_for_slot(options.priority, work, options.remaining, disconnected)
        accounting.admitted()
        headers += accounting.id_headers
        response = self._make_response(model, body, jobs, parsing, options)
        generation = RequestGeneration(jobs, options, model.tokenizer, response, service.metrics)
        response.generation = generation
        await generation.prepare(model.fleet)
        disconnected.add_done_callback(lambda _: response.on_disconnect())
        loop = asyncio.get_running_loop()
        deadline = loop.call_at(loop.time() + options.remaining + _DEADLINE_GRACE, _expire, generation)
        try:
            with service.running(generation):
                await generation.start(model.fleet)
                return await self._deliver(send, response, options, headers)
        finally:
            deadline.cancel()
            generation.close()
            accounting.computed(generation.usage, generation.ttft)
            admission.record_output(generation.usage.completion_tokens, generation.usage.cached_tokens)

    def _make_response(
        self,
        model: ServedModel,
        body: GenerateBody,
        jobs: Sequence[Job],
        parsing: OutputParsing | None,
        options: GenerationOptions,
    ) -> Response:
        return make_response(model, body, jobs, options.request_id, parsing)

    async def _deliver(self, send: Send, response: Response, options: GenerationOptions, headers: Headers) -> str:
        """Send the response and return the outcome."""
        turns = self._service.turns
        async with delivery(options.remaining, options.request_id, options.log_fields):
            if isinstance(response, EventStreamResponse):
                return await send_stream(send, response, headers, turns)
            assert isinstance(response, BodyResponse)
            return await send_body(send, response, headers, turns)


def _expire(generation: RequestGeneration) -> None:
    timeout = generation.options.timeout
    generation.fail(DeadlineExceeded(f"the request exceeded its time limit of {timeout:g} s; request fewer tokens"))
