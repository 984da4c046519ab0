"""/v1/models, /health, /ping, /health/live, /version, /metrics, and tokenizing and rendering without generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pdserve import __version__
from pdserve.errors import Draining, Overloaded, RequestError
from router.completions_api.body_parsing import convert, parse_json
from router.completions_api.chat_prompt import count_chat
from router.completions_api.jobs import check_prompt, check_vocabulary, encode_chat, encode_completion
from router.completions_api.request_bodies import ChatBody, parse_chat, parse_completion
from router.dialect.json_pieces import json_chunks, lazy_list, lazy_numbers, parts
from router.fleet.policy import EMBED, GENERATE, no_serving_node
from router.http.endpoints.body_reader import BodyReader
from router.messages_api.request import parse_count_tokens
from router.messages_api.response_objects import MessageTokensCount
from router.service import ServedModel, Service
from router.text.prompt import Prompt

VERSION = __version__


class Architecture(msgspec.Struct):
    """In OpenRouter's form. A model without ready nodes takes text as far as the router knows."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None  # the base of an adapter
    max_model_len: int | None
    architecture: Architecture


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class HealthStatus(msgspec.Struct):
    status: Literal["ok"]


class VersionInfo(msgspec.Struct):
    version: str


class TokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class PlaceholderRange(msgspec.Struct):
    offset: int
    length: int


class RenderedImages(msgspec.Struct):
    """The images of a prompt, in vLLM's form. ``mm_hashes`` are the digests that KV events have, too."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceholderRange]]


class RenderedPrompt(msgspec.Struct):
    """A prompt as a model server would get it, in vLLM's form; schedulers look it up in prefix caches."""

    model: str
    token_ids: list[int]
    features: RenderedImages | None = None


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _large_json(value: Any, turns: asyncio.Lock) -> Response:
    """Encode a large response in pieces, each in its turn."""
    chunks = json_chunks(value)
    first = next(chunks)
    second = next(chunks, None)
    if second is None:
        return Response(first, media_type="application/json")

    async def paced() -> AsyncIterator[bytes]:
        for chunk in chain([first, second], chunks):
            yield chunk
            async with turns:
                await asyncio.sleep(0)

    return StreamingResponse(paced(), media_type="application/json")


def add_info_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def card(name: str, model: ServedModel) -> ModelCard:
        try:
            max_model_len = model.fleet.limits().max_model_len
        except Overloaded:  # models are listed without ready nodes, too
            max_model_len = None
        return ModelCard(
            id=name,
            object="model",
            created=created,
            owned_by="pdserve",
            root=model.root,
            parent=model.base if model.adapter else None,
            max_model_len=max_model_len,
            architecture=Architecture(["text"] if model.fleet.image_input is None else ["text", "image"], ["text"]),
        )

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [card(name, model) for name, model in service.names.items()]
        cards += [card(model.name, model) for model in service.adapted]
        return json_response(ModelList("list", cards))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if not name:  # /v1/models/
            return await models()
        return json_response(card(name, service.find(name)))

    @app.get("/health")
    @app.get("/ping")  # health check of SageMaker and some load balancers
    async def health() -> Response:
        if service.draining:
            raise Draining("the router is draining; use another router")
        if not service.nodes.ready:
            task = GENERATE if service.options.decode else EMBED
            raise no_serving_node(next(iter(service.models.values())).fleet.snapshot(), task)
        return json_response(HealthStatus("ok"))

    @app.get("/health/live")
    async def live() -> Response:
        return json_response(HealthStatus("ok"))

    @app.get("/version")
    async def show_version() -> Response:
        return json_response(VersionInfo(VERSION))

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.export() + await service.home_metrics()
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def add_token_routes(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await bodies.read(request.receive, lambda data: convert(parse_json(data), TokenizeBody))
        model = service.find(body.model)
        token_ids = await _tokenize(model, body)
        token = model.tokenizer.token
        strings = lazy_list(lambda: (list(map(token, part)) for part in parts(token_ids)))
        response = TokenizeResponse(
            count=len(token_ids),
            max_model_len=model.fleet.limits().max_model_len,
            tokens=lazy_numbers(token_ids),
            token_strs=strings if body.return_token_strs else None,
        )
        return _large_json(response, service.turns)

    @app.post("/v1/completions/render")
    async def render_completion(request: Request) -> Response:
        body = await bodies.read(request.receive, parse_completion)
        model = service.find(body.model)
        limits = model.fleet.limits((GENERATE,))
        prompts = await encode_completion(body, model.encoder, limits)
        for prompt in prompts:
            check_prompt(prompt, limits)
        rendered = [_rendered(model, prompt) for prompt in prompts]
        return _large_json(rendered, service.turns)

    @app.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        body = await bodies.read(request.receive, parse_chat)
        model = service.find(body.model)
        chat = await encode_chat(body, model, model.fleet.limits((GENERATE,)))
        return _large_json(_rendered(model, chat.prompt), service.turns)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await bodies.read(request.receive, parse_count_tokens)
        model = service.find(body.model)
        prompt = await count_chat(body, model)
        return json_response(MessageTokensCount(prompt.num_tokens))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await bodies.read(request.receive, lambda data: convert(parse_json(data), DetokenizeBody))
        model = service.find(body.model)
        check = partial(check_vocabulary, "tokens", limits=model.fleet.limits())
        return _large_json(DetokenizeResponse(await model.encoder.decode(body.tokens, check)), service.turns)


def _rendered(model: ServedModel, prompt: Prompt) -> RenderedPrompt:
    images = None
    if prompt.images:
        images = RenderedImages(
            mm_hashes={"image": [span.digest.hex() for span in prompt.images]},
            mm_placeholders={"image": [PlaceholderRange(span.start, span.num_tokens) for span in prompt.images]},
        )
    return RenderedPrompt(model.name, lazy_numbers(prompt.unpacked()), images)


async def _tokenize(model: ServedModel, body: TokenizeBody) -> Sequence[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        prompt = await model.encoder.encode_text(body.prompt, body.add_special_tokens is not False)
    else:
        chat = ChatBody(
            messages=body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens is True,
        )
        prompt = await count_chat(chat, model)
    return prompt.unpacked()
