"""Requests of a chat to a router: its models, and the events of a streamed answer."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self, TypeVar
from urllib.parse import unquote

import httpx
import msgspec

from cli.chat.interrupts import Interrupts
from cli.numbers import count, rate, seconds
from cli.router_url import base_url, connection_errors, key_headers, wants_key
from pdserve.errors import ConfigError, NodeError, PdserveError, RequestError, shown

_Result = TypeVar("_Result")
Draw = Callable[[str, str], None]  # shows reasoning and text that have arrived

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 900.0  # a router ends requests itself, after 600 s by default


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _ErrorBody(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ErrorBody | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass
class Answer:
    """The part of an answer that has arrived."""

    text: str = ""
    finish: str = ""
    nodes: str = ""  # prefill and decode node, where the router names them
    usage: _Usage | None = None
    started: float = field(default_factory=perf_counter)
    first: float = 0.0  # arrival of the first token
    last: float = 0.0

    def summary(self) -> str:
        """Return nodes, TTFT, tokens/s and cached tokens in a line."""
        parts = [self.nodes] if self.nodes else []
        if self.first:
            parts.append(f"first token {seconds(self.first - self.started)}")
        if usage := self.usage:
            if usage.completion_tokens > 1 and self.last > self.first:
                parts.append(f"{rate((usage.completion_tokens - 1) / (self.last - self.first))} tokens/s")
            cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
            parts.append(f"{count(usage.completion_tokens)} tokens")
            parts.append(f"{count(cached)} of {count(usage.prompt_tokens)} prompt tokens cached")
        if self.finish == "length":
            parts.append("stopped at the limit of tokens")
        return " · ".join(parts)


class ChatClient:
    """A SIGINT that ``interrupts`` handles raises KeyboardInterrupt from a call, after its connection was closed."""

    def __init__(self, args: argparse.Namespace, interrupts: Interrupts) -> None:
        """Raises ConfigError."""
        self._interrupts = interrupts
        self._runner = asyncio.Runner()
        self.url = base_url(args.url)
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        with connection_errors(self.url):
            self._client = httpx.AsyncClient(base_url=self.url, headers=key_headers(args), timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def models(self) -> list[str]:
        """Return the names of the router's models. Raises ConfigError or NodeError."""
        with connection_errors(self.url):
            response = self._run(self._client.get("/v1/models"))
        self._check(response)
        try:
            return [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
        except msgspec.DecodeError as exc:
            raise ConfigError(f"{self.url} does not speak the OpenAI protocol: {exc}; check the URL") from exc

    def answer(self, body: dict[str, Any], answer: Answer, draw: Draw) -> None:
        """Fill in the answer and draw its parts as they arrive. Raises PdserveError.

        An exception, also of ``draw``, closes the connection, which ends the request at its nodes.
        """
        with connection_errors(self.url):
            self._run(self._stream(body, answer, draw))

    async def _stream(self, body: dict[str, Any], answer: Answer, draw: Draw) -> None:
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            self._check(response)
            named = [unquote(response.headers.get(f"x-pdserve-{role}-node", "")) for role in ("prefill", "decode")]
            answer.nodes = " → ".join(filter(None, named))
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    for reasoning, text in _parts(line[6:], answer):
                        draw(reasoning, text)
        raise NodeError("the connection ended before the answer did; try again")

    def _run(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        async def cancellable() -> _Result:
            task = asyncio.current_task()
            assert task is not None
            with self._interrupts.cancelling(task):
                return await call

        try:
            return self._runner.run(cancellable())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _check(self, response: httpx.Response) -> None:
        """Raise the error of an error response."""
        if response.status_code == 200:
            return
        if response.status_code == 401:
            raise wants_key(self.url)
        try:
            error = msgspec.json.decode(response.content, type=_Event).error
        except msgspec.DecodeError:
            error = None
        if error is None:
            raise NodeError(f"{self.url} answered with status {response.status_code}; check the URL")
        kind: type[PdserveError] = RequestError if response.status_code < 500 else NodeError
        raise kind(error.message)


def _parts(data: str, answer: Answer) -> Iterator[tuple[str, str]]:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as exc:
        raise NodeError(f"unknown event {shown(data)}: {exc}; is this a router?") from exc
    if event.error is not None:
        raise NodeError(event.error.message)
    answer.usage = event.usage or answer.usage
    for choice in event.choices:
        answer.finish = choice.finish_reason or answer.finish
        reasoning = choice.delta.reasoning or ""
        text = choice.delta.content or ""
        if reasoning or text:
            answer.last = perf_counter()
            answer.first = answer.first or answer.last
            answer.text += text
            yield reasoning, text
