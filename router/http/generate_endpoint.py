"""/v1/completions, /v1/chat/completions and /v1/responses: from an HTTP request to a generation and its response.

Raw ASGI, because there is a chunk per token. The status line waits for the first token, so an earlier failure has a
real status. A later failure is an error event without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.rpc.http_connections import abort_connection
from router.completions_api.jobs import add_echo, encode_prompts, make_job
from router.completions_api.request_bodies import GenerateBody
from router.completions_api.response_writers import BodyResponse, EventStreamResponse, Response
from router.errors import ClientDisconnected, status_and_type
from router.gate.admission import RequestAdmission, RequestWork
from router.gate.rate_limits import Headers
from router.generation.generation import RequestGeneration
from router.generation.job import GenerationOptions
from router.http.authentication import address_of, client_of
from router.http.body_reader import BodyReader
from router.http.error_responses import error_response
from router.http.request_accounting import RequestAccounting
from router.http.response_factory import make_response, output_grammar, select_output_parsing, visible_special_tokens
from router.service import Service
from router.text.stop_strings import StopStrings

logger = logging.getLogger(__name__)

_DEADLINE_GRACE = 0.5  # seconds that nodes get to end a request by its deadline before the router does
_DELIVERY_GRACE = 60.0  # seconds beyond the deadline in which a slow client may read the rest
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # makes nginx forward each chunk
]


class GenerateEndpoint:
    """ASGI application of one path."""

    def __init__(self, service: Service, bodies: BodyReader, name: str, parse: Callable[[bytes], GenerateBody]) -> None:
        self._service = service
        self._bodies = bodies
        self._name = name
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, client = self._service, client_of(scope)
        accounting = RequestAccounting(service, self._name, client, scope)
        try:
            with service.admission.enter(client, address_of(scope)) as admission:
                body = await self._bodies.read(receive, self._parse)
                async with _watch_disconnect(receive) as disconnected:
                    accounting.finished(await self._generate(body, send, admission, accounting, disconnected))
        except PdserveError as exc:
            accounting.failed(exc)
            response = error_response(exc)
            response.headers["x-request-id"] = accounting.request_id
            await response(scope, receive, send)
        except ClientDisconnected:
            accounting.disconnected()
            abort_connection(scope)
        finally:
            accounting.close()

    async def _generate(
        self,
        body: GenerateBody,
        send: Send,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        """Return the outcome. Raises PdserveError only before the first byte is sent."""
        service = self._service
        model = service.find(body.model)
        accounting.model = model.name
        limits = model.fleet.limits()
        prompts = await encode_prompts(body, model.encoder, limits)
        grammar = output_grammar(model, body, prompts[0])
        await model.grammars.check(grammar)
        prompts = await add_echo(prompts, body, model.encoder)
        jobs = [make_job(prompt, body, limits, grammar.text, model.defaults) for prompt in prompts]
        parsing = select_output_parsing(model, body, prompts[0])
        options = GenerationOptions(
            request_id=accounting.request_id,
            arrived=accounting.arrived,
            timeout=service.options.request_timeout,
            migrations=service.options.migrations,
            stops=StopStrings(body.stops),
            cache_salt=admission.cache_salt(body.cache_salt),
            priority=admission.clamp_priority(body.priority),
            client_tag=admission.client_tag,
            continues_prompt=body.continues_prompt,
            visible_special_tokens=visible_special_tokens(body, parsing),
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
        headers.append((b"x-request-id", options.request_id.encode()))
        response = make_response(model, body, jobs, options.request_id, parsing)
        generation = RequestGeneration(jobs, options, model.tokenizer, response, service.metrics)
        response.generation = generation
        await generation.prepare(model.fleet)
        disconnected.add_done_callback(lambda _: response.on_disconnect())
        loop = asyncio.get_running_loop()
        deadline = loop.call_at(loop.time() + options.remaining + _DEADLINE_GRACE, _expire, generation)
        try:
            with service.running(generation):
                await generation.start(model.fleet)
                return await _send_response(send, response, options, headers, service.turns)
        finally:
            deadline.cancel()
            generation.close()
            accounting.generated(generation)
            admission.record_output(generation.usage.completion_tokens, generation.usage.cached_tokens)


@asynccontextmanager
async def _watch_disconnect(receive: Receive) -> AsyncIterator[asyncio.Future[None]]:
    """Yield a future that is done once the client has disconnected."""
    disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set_result(None)

    watcher = asyncio.create_task(watch())
    try:
        yield disconnected
    finally:
        watcher.cancel()


def _expire(generation: RequestGeneration) -> None:
    timeout = generation.options.timeout
    generation.fail(DeadlineExceeded(f"the request exceeded its time limit of {timeout:g} s; request fewer tokens"))


async def _send_response(
    send: Send, response: Response, options: GenerationOptions, headers: Headers, turns: asyncio.Lock
) -> str:
    """Send the response and return the outcome. A client that reads beyond the grace period is disconnected."""
    try:
        async with asyncio.timeout(options.remaining + _DELIVERY_GRACE):
            if isinstance(response, EventStreamResponse):
                return await _send_stream(send, response, headers, turns)
            assert isinstance(response, BodyResponse)
            return await _send_body(send, response, headers, turns)
    except TimeoutError as exc:
        text = "request %s: the client reads too slowly; closing its connection"
        logger.warning(text, options.request_id, extra=options.log_fields)
        raise ClientDisconnected from exc


async def _send_body(send: Send, response: BodyResponse, headers: Headers, turns: asyncio.Lock) -> str:
    """``turns`` is held for each further piece of a large response, so that one is encoded per turn of the loop."""
    while not response.ended and not response.disconnected:
        response.wake.clear()
        await response.wake.wait()
    if response.error is not None:
        raise response.error
    if response.disconnected:
        raise ClientDisconnected
    pieces = response.body()
    body, following = next(pieces), next(pieces, None)
    headers = [(b"content-type", b"application/json"), *headers]
    if following is None:
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while following is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        async with turns:
            await asyncio.sleep(0)
        if response.disconnected:
            raise ClientDisconnected
        body, following = following, next(pieces, None)
    await send({"type": "http.response.body", "body": body})
    return "ok"


async def _send_stream(send: Send, response: EventStreamResponse, headers: Headers, turns: asyncio.Lock) -> str:
    await response.wake.wait()
    if response.error is not None and not response.started:
        raise response.error
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *headers]})
    while not response.disconnected:
        data = response.take()
        last = response.ended and not response.has_more
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        response.sent()
        if last:
            return "ok" if response.error is None else status_and_type(response.error)[1]
        if response.has_more:
            async with turns:
                await asyncio.sleep(0)
        else:
            await response.wake.wait()
    raise ClientDisconnected
