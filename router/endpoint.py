"""/v1/completions and /v1/chat/completions: from an HTTP request to a generation, and its bytes back.

Raw ASGI, because a chunk is written per token. The status line is held back until the first token, so that whatever
fails before is a real status; what fails later becomes an ``error`` event, and no [DONE] follows.
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

from starlette.types import Receive, Scope, Send

from pdserve.errors import DeadlineExceeded, PdserveError
from router.errors import BodyTooLarge, http_error, kind_of
from router.formats import ChatFormat, CompletionFormat, new_request_id
from router.generation import Generation, GenerationOptions
from router.job import Job, Prompt, make_job
from router.requests import ChatBody, CompletionBody, GenerateBody, Parser
from router.responses import Response, ResponseOptions, StreamResponse, WholeResponse
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


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class GenerateEndpoint:
    """An ASGI application for one of the two paths."""

    def __init__(self, service: Service, name: str, parse: Parser) -> None:
        self._service = service
        self._name = name
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = perf_counter()
        metrics = self._service.metrics
        outcome = "server_error"
        try:
            with self._service.slot():
                outcome = await self._serve(receive, send, arrived)
        except PdserveError as exc:
            outcome = kind_of(exc)[1]
            await send_error(send, exc)
        except ClientGone:
            outcome = "disconnected"
        finally:
            metrics.requests.labels(self._name, outcome).inc()
            metrics.duration.labels(self._name).observe(perf_counter() - arrived)

    async def _serve(self, receive: Receive, send: Send, arrived: float) -> str:
        """Returns the outcome. Raises PdserveError only while no byte has been sent."""
        service = self._service
        body = self._parse(await read_body(receive, service.options.max_body_bytes))
        service.check_model(body.model)
        limits = service.fleet.limits()
        prompts = await service.encoder.encode(body)
        jobs = [make_job(self._with_text(prompt, body), body, limits) for prompt in prompts]
        options = GenerationOptions(
            request_id=new_request_id(),
            arrived=arrived,
            timeout=service.options.request_timeout,
            stops=body.stops,
            cache_salt=body.cache_salt,
            continues_prompt=isinstance(body, CompletionBody),
        )
        response = self._response(body, jobs, options.request_id)
        generation = Generation(jobs, options, service.tokenizer, response, service.metrics)
        response.generation = generation
        loop = asyncio.get_running_loop()
        deadline = loop.call_at(loop.time() + options.timeout + _DEADLINE_GRACE, _expire, generation)
        watcher = asyncio.create_task(_watch_disconnect(receive, response))
        try:
            with service.running(generation):
                generation.start(service.fleet)
                return await _answer(send, response, options)
        finally:
            deadline.cancel()
            watcher.cancel()
            generation.cancel()

    def _response(self, body: GenerateBody, jobs: list[Job], request_id: str) -> Response:
        include_usage = body.stream and body.stream_options.include_usage
        kind = ChatFormat if isinstance(body, ChatBody) else CompletionFormat
        model = body.model or self._service.model
        form = kind(self._service.tokenizer, model, request_id, max(body.num_logprobs, 0), include_usage)
        options = ResponseOptions(
            num_logprobs=body.num_logprobs,
            echo=isinstance(body, CompletionBody) and body.echo,
            return_token_ids=body.return_token_ids,
            include_usage=include_usage,
            continuous_usage=include_usage and body.stream_options.continuous_usage_stats,
        )
        return (StreamResponse if body.stream else WholeResponse)(form, options, jobs)

    def _with_text(self, prompt: Prompt, body: GenerateBody) -> Prompt:
        """Echo needs the text of prompts that came as token ids."""
        if prompt.text is None and isinstance(body, CompletionBody) and body.echo:
            return Prompt(prompt.token_ids, self._service.tokenizer.decode(prompt.token_ids, skip_special_tokens=True))
        return prompt


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge beyond ``limit`` bytes, DeadlineExceeded, ClientGone."""
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
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the body exceeds {limit} bytes; send less", code="body_too_large")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_error(send: Send, error: PdserveError) -> None:
    answer = http_error(error)
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


async def _watch_disconnect(receive: Receive, response: Response) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    response.on_disconnect()


def _expire(generation: Generation) -> None:
    timeout = generation.options.timeout
    generation.fail(DeadlineExceeded(f"the request took longer than {timeout:g} s; ask for fewer tokens"))


async def _answer(send: Send, response: Response, options: GenerationOptions) -> str:
    """Send the response and return the outcome. A client that does not read is left after some time."""
    try:
        async with asyncio.timeout(options.timeout + _DELIVERY_GRACE) as patience:
            if isinstance(response, StreamResponse):
                response.cut_off = lambda: patience.reschedule(asyncio.get_running_loop().time())
                return await _stream(send, response, options.request_id)
            assert isinstance(response, WholeResponse)
            return await _whole(send, response, options.request_id)
    except TimeoutError as exc:
        logger.warning("request %s: the client reads too slowly; its connection is closed", options.request_id)
        raise ClientGone from exc


async def _whole(send: Send, response: WholeResponse, request_id: str) -> str:
    while not response.ended and not response.gone:
        response.wake.clear()
        await response.wake.wait()
    if response.error is not None:
        raise response.error
    if response.gone:
        raise ClientGone
    body = response.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), _id_header(request_id)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return "ok"


async def _stream(send: Send, response: StreamResponse, request_id: str) -> str:
    await response.wake.wait()
    if response.error is not None and not response.started:
        raise response.error
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, _id_header(request_id)]})
    while not response.gone:
        data = response.take()
        await send({"type": "http.response.body", "body": data, "more_body": not response.ended})
        if response.ended:
            return "ok" if response.error is None else kind_of(response.error)[1]
        await response.wake.wait()
    raise ClientGone


def _id_header(request_id: str) -> tuple[bytes, bytes]:
    return b"x-request-id", request_id.encode()
