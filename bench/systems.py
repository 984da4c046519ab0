"""The systems that bench/goodput.py measures: servers round-robin, vLLM's prefill and decode server, or LMDeploy.

LMDeploy takes token ids only at ``/generate``, whose events this module reads. An event has the tokens since the last
one; the last event has none. Its sampling is not greedy by default.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, NamedTuple

import msgspec

from cli.bench.http_load import COMPLETIONS, Endpoint, ServerError, StreamReader, Trace, complete, stream
from cli.bench.requests import Request, completion_body
from pdserve.errors import ConfigError, cut, shown

OPENAI = "openai"
VLLM_PD = "vllm-pd"
LMDEPLOY = "lmdeploy"
SYSTEMS = f"NAME=URL[,URL…], NAME={VLLM_PD}:P,D or NAME={LMDEPLOY}:URL[,URL…]"


class System(NamedTuple):
    """A system to measure. The endpoints of a VLLM_PD are its prefill and its decode server."""

    name: str
    endpoints: tuple[Endpoint, ...]
    kind: str = OPENAI

    @classmethod
    def of(cls, text: str) -> System:
        """Parse a text as in SYSTEMS. Raises ConfigError."""
        name, _, urls = text.partition("=")
        kind = next((kind for kind in (VLLM_PD, LMDEPLOY) if urls.startswith(f"{kind}:")), OPENAI)
        endpoints = tuple(Endpoint.of(url) for url in urls.removeprefix(f"{kind}:").split(","))
        if not name or (kind == VLLM_PD and len(endpoints) != 2):
            raise ConfigError(f"--system {shown(text)} is invalid; use {SYSTEMS}")
        return cls(name, endpoints, kind)

    def body(self, model: str, request: Request, salt: str) -> bytes:
        """Return the body of a streamed greedy completion; requests share cached prefixes only under one ``salt``."""
        if self.kind == LMDEPLOY:
            return lmdeploy_body(request)
        return completion_body(model, request, salt)

    async def complete(self, number: int, body: bytes, num_tokens: int, trace: Trace, timeout: float) -> None:
        """Send a request to the endpoint whose turn it is, or through vLLM's P and D, and fill in its trace."""
        endpoint = self.endpoints[number % len(self.endpoints)]
        if self.kind == LMDEPLOY:
            await generate(endpoint, body, num_tokens, trace, timeout)
            return
        headers = None
        if self.kind == VLLM_PD:
            prefill, endpoint = self.endpoints
            headers = {"X-Request-Id": str(uuid.uuid4())}  # the connector wants the same one on both sides
            trace.start = time.perf_counter()
            try:
                async with asyncio.timeout(timeout):
                    body = await with_transfer(prefill, body, headers)
            except (OSError, TimeoutError, ServerError) as exc:
                trace.error = f"prefill: {exc or type(exc).__name__}"
                return
        await complete(endpoint, body, num_tokens, trace, timeout, headers)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any]


async def with_transfer(prefill: Endpoint, body: bytes, headers: dict[str, str]) -> bytes:
    """Let vLLM's prefill server compute the prompt; return the body for its decode server.

    Raises OSError or ServerError.
    """
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    fields = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
    short = {**msgspec.json.decode(body), "max_tokens": 1, "stream": False, "kv_transfer_params": fields}
    del short["stream_options"]
    answer = bytearray()
    status = await prefill.exchange("POST", COMPLETIONS, msgspec.json.encode(short), answer.extend, headers)
    try:
        if status == 200:
            params = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
            return body[:-1] + b',"kv_transfer_params":' + msgspec.json.encode(params) + b"}"
    except msgspec.DecodeError:
        pass  # no parameters, or null: the server has no connector
    raise ServerError(f"HTTP {status} without kv_transfer_params: {cut(answer.decode(errors='replace'))}")


# ---------------------------------------------------------------- LMDeploy's /generate


def lmdeploy_body(request: Request) -> bytes:
    """Return the body of a streamed greedy completion. LMDeploy caches no prefixes unless a flag says so."""
    greedy = {"top_k": 1, "temperature": 1.0}
    fields = {"input_ids": request.prompt, "max_tokens": request.num_tokens, "ignore_eos": True, "stream": True}
    return msgspec.json.encode({**fields, **greedy})


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None


class _Generated(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class GenerateReader(StreamReader):
    """Reads the events of LMDeploy's ``/generate``."""

    _decoder = msgspec.json.Decoder(_Generated)

    def take(self, data: bytes, now: float) -> None:
        event = self._decoder.decode(data)
        trace = self.trace
        if event.error is not None:
            trace.error = cut(str(event.error))
        trace.tokens += [now] * len(event.output_ids)
        trace.num_tokens += len(event.output_ids)
        trace.prompt_tokens = event.meta_info.prompt_tokens or 0
        ending = event.meta_info.finish_reason
        if ending is not None and ending.get("type") != "length":
            trace.error = trace.error or f"the answer has ended with {cut(str(ending))}"


async def generate(endpoint: Endpoint, body: bytes, num_tokens: int, trace: Trace, timeout: float) -> None:
    """Send a body of ``lmdeploy_body`` and fill in the trace, which gets an error instead of an exception."""
    reader = GenerateReader(trace)
    await stream(endpoint, "/generate", body, reader, timeout)
    if not trace.error and trace.num_tokens != num_tokens:
        refusal = f": {cut(reader.other.decode(errors='replace'))}" if reader.other else ""  # with status 200, too
        trace.error = f"{trace.num_tokens} tokens instead of {num_tokens}{refusal}"
