"""The PoolingNode service: vectors of prompts, computed by a prefill node alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from node.context import NodeContext
from node.engine_client.client import EngineClient
from node.engine_client.request_events import Event, error_of
from node.request_checks import check_request
from node.streams.stream_writer import Context
from pdserve.errors import Draining, NodeError, PdserveError, RequestError
from pdserve.ipc.messages import Cancel, Mode, Pooled, Prefilled, Refused, Submit
from pdserve.logprobs import TokenLogprobs
from pdserve.model.pooling import EMBED, MEAN, PoolingConfig
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import FinishReason
from pdserve.rpc.errors import abort
from pdserve.rpc.field_ranges import check_message
from pdserve.rpc.message_limits import ANSWER_LIMIT
from pdserve.sampling_params import SamplingParams

_ONE_STEP = SamplingParams(max_tokens=1, temperature=0.0)  # the sampled token is ignored
_VALUE_BYTES = 4  # a float32


class PendingPrompt:
    """A prompt in the engine; ``result`` is its vector and the number of its cached tokens."""

    def __init__(self, engine: EngineClient, message: pb.PoolRequest, *, token_ids: bytes, cache_salt: str) -> None:
        self.result: asyncio.Future[tuple[bytes, int]] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._rid = engine.open(self)
        self._cached_tokens = 0
        self._vector = b""
        submit = Submit(
            rid=self._rid,
            token_ids=token_ids,
            sampling=_ONE_STEP,
            mode=Mode.LOCAL,
            cache_salt=cache_salt,
            priority=message.priority,
            client=message.client,
        )
        engine.send(submit)

    def close(self) -> None:
        """Forget the prompt, and cancel it if it has not ended."""
        self._engine.close(self._rid)
        if not self.result.done() or self.result.cancelled():
            self._engine.send(Cancel(self._rid))
        self.result.cancel()

    def on_event(self, event: Event) -> None:
        match event:
            case Prefilled():
                self._cached_tokens = event.cached_tokens
            case Pooled():
                self._vector = event.vector
            case Refused() if not self.result.done():
                self.result.set_exception(error_of(event))

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        if not self.result.done():
            self.result.set_result((self._vector, self._cached_tokens))

    def fail(self, error: PdserveError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class PoolingService(pb_grpc.PoolingNodeServicer):
    """A Drainable. Its calls are unary: after a failure, routers repeat the call at another node."""

    release_timeout = 0.0

    def __init__(self, node: NodeContext, config: PoolingConfig) -> None:
        self._node = node
        self._config = config
        self._open: set[PendingPrompt] = set()
        self._ended = asyncio.Event()
        self._numbers = 0  # prompts so far with a salt of their own, which share no cache

    async def finish(self) -> None:
        while self._open:
            self._ended.clear()
            await self._ended.wait()

    def hand_over(self, why: Draining) -> None:
        for prompt in self._open:
            prompt.fail(why)

    def reopen(self) -> None:
        """Do nothing: there are no streams."""

    async def wait_released(self) -> None:
        """Return at once: no peer reads anything from this node."""

    async def Pool(self, request: pb.PoolRequest, context: Context) -> pb.PoolReply:
        try:
            self._node.check_ready()
            self._check(request)
            return await self._pool(request)
        except PdserveError as exc:
            await abort(context, exc)

    def _check(self, request: pb.PoolRequest) -> None:
        check_message(request)
        config = self._node.config
        size = self._config.size
        for prompt in request.prompts:
            check_request(prompt, _ONE_STEP, config, max_tokens=0)
        if not request.prompts:
            raise RequestError("the request has 0 prompts; send at least 1", "prompts")
        if len(request.prompts) * size * _VALUE_BYTES > ANSWER_LIMIT // 2:
            most = ANSWER_LIMIT // 2 // (size * _VALUE_BYTES)
            raise RequestError(f"the request has {len(request.prompts)} prompts; the limit is {most}", "prompts")
        if request.dimensions and (self._config.task != EMBED or request.dimensions > size):
            raise RequestError(f"dimensions {request.dimensions} must be at most {size}, of embeddings", "dimensions")

    async def _pool(self, request: pb.PoolRequest) -> pb.PoolReply:
        weights = self._node.weights  # a change waits for open prompts, or fails them
        prompts = [
            PendingPrompt(self._node.engine, request, token_ids=token_ids, cache_salt=self._salt(request))
            for token_ids in request.prompts
        ]
        self._open.update(prompts)
        try:
            results = await asyncio.gather(*(prompt.result for prompt in prompts))
        finally:
            for prompt in prompts:
                prompt.close()
            self._open.difference_update(prompts)
            self._ended.set()
        return pb.PoolReply(
            vectors=self._shortened([vector for vector, _ in results], request.dimensions),
            cached_tokens=[cached for _, cached in results],
            weights=weights,
        )

    def _salt(self, request: pb.PoolRequest) -> str:
        """Return the prefix cache's salt. A mean needs the hidden states of all tokens: a unique salt prevents hits."""
        if self._config.method != MEAN:
            return request.cache_salt
        self._numbers += 1
        return f"{request.cache_salt}/{self._numbers}"

    def _shortened(self, vectors: Sequence[bytes], dimensions: int) -> list[bytes]:
        """Cut embeddings and normalize them again. Raises NodeError for a vector with values that are not finite."""
        table = np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), self._config.size)
        if not np.isfinite(table).all():
            raise NodeError("a vector has values that are not finite; send the request again")
        if dimensions and dimensions < self._config.size:
            table = table[:, :dimensions]
            if self._config.normalize:
                table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        return [row.tobytes() for row in table]
