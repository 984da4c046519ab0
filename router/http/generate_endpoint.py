"""/v1/completions, /v1/chat/completions and /v1/responses: from an HTTP request to a generation, and its bytes back.

Raw ASGI, because a chunk is written per token. The status line is held back until the first token, so that whatever
fails before is a real status; what fails later becomes an event, and no [DONE] follows.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Receive, Scope, Send

from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.rpc.http_connections import hang_up
from router.completions_api.prompts import add_echo, encode_prompts
from router.completions_api.request_bodies import GenerateBody, Parser
from router.completions_api.response_writers import BodyResponse, EventResponse, Response
from router.completions_api.sampling import make_job
from router.errors import BodyTooLarge, ClientDisconnected, status_and_type
from router.gate.admission import Visit
from router.gate.rate_limits import Headers
from router.generation.generation import GenerationOptions, RequestGeneration
from router.http.authentication import client_of
from router.http.error_responses import http_error, send_error
from router.http.request_accounting import RequestAccount
from router.http.response_factory import make_response, output_grammar, output_reading, visible_special_tokens
from router.service import Service

logger = logging.getLogger(__name__)

_BODY_TIMEOUT = 60.0  # seconds in which a body must have arrived: until then it takes up a place of --max-inflight
_DEADLINE_GRACE = 0.5  # seconds that the nodes have to end a request by its deadline before the router does
_DELIVERY_GRACE = 60.0  # seconds beyond the deadline in which a slow client may still read the end of its response
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx to pass chunks on at once
]


class GenerateEndpoint:
    """An ASGI application for one of these paths."""

    def __init__(self, service: Service, name: str, parse: Parser) -> None:
        self._service = service
        self._name = name
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, client = self._service, client_of(scope)
        account = RequestAccount(service, self._name, client, scope)
        try:
            with service.gate.enter(client) as visit:
                account.answered(await self._serve(receive, send, visit, account))
        except PdserveError as exc:
            account.refused(exc)
            await send_error(send, http_error(exc))
        except ClientDisconnected:
            account.left()
            hang_up(scope)
        finally:
            account.close()

    async def _serve(self, receive: Receive, send: Send, visit: Visit, account: RequestAccount) -> str:
        """Returns the outcome. Raises PdserveError only while no byte has been sent."""
        body = self._parse(await read_body(receive, self._service.options.max_body_bytes))
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watcher = asyncio.create_task(_watch_disconnect(receive, gone))
        try:
            return await self._generate(body, send, visit, account, gone)
        finally:
            watcher.cancel()

    async def _generate(
        self, body: GenerateBody, send: Send, visit: Visit, account: RequestAccount, gone: asyncio.Future[None]
    ) -> str:
        service = self._service
        model = service.find(body.model)
        account.takes(model.name)
        limits = model.fleet.limits()
        prompts = await encode_prompts(body, model.encoder, limits)
        structure = output_grammar(model, body, prompts[0])
        await model.grammars.check(structure)
        prompts = await add_echo(prompts, body, model.tokenizer)
        jobs = [make_job(prompt, body, limits, structure.grammar) for prompt in prompts]
        reading = output_reading(model, body, prompts[0])
        options = GenerationOptions(
            request_id=account.request_id,
            arrived=account.arrived,
            timeout=service.options.request_timeout,
            migrations=service.options.migrations,
            stops=body.stops,
            cache_salt=body.cache_salt,
            priority=visit.priority(body.priority),
            continues_prompt=body.continues_prompt,
            shown_tokens=visible_special_tokens(body, reading),
            span=account.span,
        )
        num_tokens = sum(prompt.num_tokens for prompt in prompts)
        account.waits()
        headers = await visit.admit(options.priority, num_tokens, options.remaining, gone)
        account.admitted()
        headers.append((b"x-request-id", options.request_id.encode()))
        response = make_response(model, body, jobs, options.request_id, reading)
        generation = RequestGeneration(jobs, options, model.tokenizer, response, service.metrics)
        response.generation = generation
        await generation.prepare(model.fleet)
        gone.add_done_callback(lambda _: response.on_disconnect())
        loop = asyncio.get_running_loop()
        deadline = loop.call_at(loop.time() + options.remaining + _DEADLINE_GRACE, _expire, generation)
        try:
            with service.running(generation):
                generation.start(model.fleet)
                return await _answer(send, response, options, headers)
        finally:
            deadline.cancel()
            generation.close()
            account.used(generation)
            visit.used(generation.usage.completion_tokens)


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge beyond ``limit`` bytes, DeadlineExceeded, ClientDisconnected."""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            return await _read_chunks(receive, limit)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"the body did not arrive within {_BODY_TIMEOUT:g} s; send it faster") from exc


async def _read_chunks(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the body exceeds {limit} bytes; send less", code="body_too_large")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _watch_disconnect(receive: Receive, gone: asyncio.Future[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set_result(None)


def _expire(generation: RequestGeneration) -> None:
    timeout = generation.options.timeout
    generation.fail(DeadlineExceeded(f"the request took longer than {timeout:g} s; ask for fewer tokens"))


async def _answer(send: Send, response: Response, options: GenerationOptions, headers: Headers) -> str:
    """Send the response and return the outcome. A client that does not read is left after some time."""
    try:
        async with asyncio.timeout(options.remaining + _DELIVERY_GRACE) as patience:
            if isinstance(response, EventResponse):
                response.cut_off = lambda: patience.reschedule(asyncio.get_running_loop().time())
                return await _stream(send, response, headers)
            assert isinstance(response, BodyResponse)
            return await _whole(send, response, headers)
    except TimeoutError as exc:
        text = "request %s: the client reads too slowly; its connection is closed"
        logger.warning(text, options.request_id, extra=options.about)
        raise ClientDisconnected from exc


async def _whole(send: Send, response: BodyResponse, headers: Headers) -> str:
    while not response.ended and not response.gone:
        response.wake.clear()
        await response.wake.wait()
    if response.error is not None:
        raise response.error
    if response.gone:
        raise ClientDisconnected
    body = response.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return "ok"


async def _stream(send: Send, response: EventResponse, headers: Headers) -> str:
    await response.wake.wait()
    if response.error is not None and not response.started:
        raise response.error
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *headers]})
    while not response.gone:
        data = response.take()
        await send({"type": "http.response.body", "body": data, "more_body": not response.ended})
        if response.ended:
            return "ok" if response.error is None else status_and_type(response.error)[1]
        await response.wake.wait()
    raise ClientDisconnected
