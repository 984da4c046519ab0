"""The systems that bench/goodput.py measures: one server, several round-robin, or vLLM's prefill and decode server."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, NamedTuple

import msgspec

from cli.bench.http_load import COMPLETIONS, Endpoint, ServerError, Trace, complete
from pdserve.errors import ConfigError, cut, shown

VLLM_PD = "vllm-pd"


class System(NamedTuple):
    """A system to measure; ``is_vllm_pd``: the endpoints are vLLM's prefill and decode server."""

    name: str
    endpoints: tuple[Endpoint, ...]
    is_vllm_pd: bool = False

    @classmethod
    def of(cls, text: str) -> System:
        """Parse NAME=URL[,URL…] or NAME=vllm-pd:P,D. Raises ConfigError."""
        name, _, urls = text.partition("=")
        is_vllm_pd = urls.startswith(f"{VLLM_PD}:")
        endpoints = tuple(Endpoint.of(url) for url in urls.removeprefix(f"{VLLM_PD}:").split(","))
        if not name or (is_vllm_pd and len(endpoints) != 2):
            raise ConfigError(f"--system {shown(text)} is invalid; use NAME=URL[,URL…] or NAME={VLLM_PD}:P,D")
        return cls(name, endpoints, is_vllm_pd)

    async def complete(self, number: int, body: bytes, num_tokens: int, trace: Trace, timeout: float) -> None:
        """Send a request to the endpoint whose turn it is, or through vLLM's P and D, and fill in its trace."""
        endpoint = self.endpoints[number % len(self.endpoints)]
        headers = None
        if self.is_vllm_pd:
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
