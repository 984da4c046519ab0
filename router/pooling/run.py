"""A running request at prefill nodes: calls with a part of its prompts each, repeated elsewhere when a node fails.

    batches ──► 2 calls per ready node at a time ──► vectors, in the order of the prompts
                 └── node lost, full or failed ──► the batch waits for another node

All vectors are of one version of the weights: that of most nodes, or of the node that gets a small request. If no node
has it any more, the run begins again with another one. A vector depends on its prompt and the weights, so a repeated
call changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic

import msgspec
import numpy as np

from pdserve.errors import DeadlineExceeded, EngineCrashed, NodeError, Overloaded
from pdserve.logs import request_fields
from pdserve.pb import pdserve_pb2 as pb
from pdserve.tracing.spans import NO_SPAN, Span, SpanKind
from router.errors import CrashingRequest
from router.fleet.fleet import Fleet
from router.fleet.node_attempts import LONGEST_PAUSE, AvoidedNodes, NodeAttempts, failure_reason
from router.fleet.policy import NodeView
from router.generation.usage import Usage
from router.metrics import ModelMetrics
from router.pooling.batches import split
from router.text.prompt import Prompt

logger = logging.getLogger(__name__)

_CALLS_PER_NODE = 2  # concurrent calls: the node computes one while the next is on its way
_MAX_VERSIONS = 4  # weight versions that a request tries
_DEADLINE_GRACE = 0.5  # seconds that a call may outlive the request, whose own error says more
_VALUE_BYTES = 4  # one float32


class PoolingOptions(msgspec.Struct, frozen=True):
    """``arrived`` is of ``time.monotonic``."""

    request_id: str
    task: str
    arrived: float
    timeout: float  # seconds
    dimensions: int = 0  # values per embedding; 0: all
    migrations: int = 0  # node failures after which a batch may still go to another node
    cache_salt: str = ""
    priority: int = 0
    client_tag: int = 0  # opaque; nodes are fair between clients
    span: Span = NO_SPAN  # span of the request

    @property
    def remaining(self) -> float:
        """Seconds left of the timeout."""
        return self.timeout - (monotonic() - self.arrived)


class _WeightsGone(Exception):
    """No usable node has the weights of the vectors so far, but others are usable."""


class PoolingRun:
    """Starts at once. ``vectors`` returns its result, and ``weights`` is the version that computed it."""

    def __init__(self, prompts: Sequence[Prompt], options: PoolingOptions, fleet: Fleet, metrics: ModelMetrics) -> None:
        self.usage = Usage(prompt_tokens=sum(prompt.num_tokens for prompt in prompts))
        self.weights: str | None = None  # None: until a node is chosen
        self._prompts = prompts
        self._options = options
        self._fleet = fleet
        self._metrics = metrics
        self._vectors = [b""] * len(prompts)
        self._most_failures = 0  # node failures of the batch with the most
        self._failures_before = 0  # that number before the present version of the weights
        self._avoided = AvoidedNodes()  # by all batches
        self._error: Exception | None = None
        self._suspect = False  # an engine has ended in a step with a batch
        metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        self._task = asyncio.create_task(self._run(), name=f"pooling {options.request_id}")

    async def vectors(self) -> list[bytes]:
        """Return a vector per prompt, little-endian float32. Raises the error of ``fail``, or PdserveError."""
        try:
            await self._task
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._task.cancel()
        return self._vectors

    def fail(self, error: Exception) -> None:
        """End with an error and cancel the calls. Does nothing after the end."""
        if not self._task.done() and self._error is None:
            self._error = error
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._options.remaining):
                await self._compute_all()
        except TimeoutError as exc:
            text = f"the request exceeded its time limit of {self._options.timeout:g} s; send fewer texts"
            raise DeadlineExceeded(text) from exc

    async def _compute_all(self) -> None:
        for _ in range(_MAX_VERSIONS):
            try:
                return await self._compute_one_version()
            except _WeightsGone:
                text = "request %s begins again: no usable node has the weights %s"
                logger.info(text, self._options.request_id, self.weights)
        text = f"the weights of the prefill nodes changed {_MAX_VERSIONS} times under the request; send it again"
        raise NodeError(text)

    async def _compute_one_version(self) -> None:
        """Raises _WeightsGone."""
        self._vectors = [b""] * len(self._prompts)
        self.usage.cached_tokens = 0
        self.weights = None
        self._failures_before = self._most_failures
        nodes = self._usable()
        lengths = [prompt.num_tokens for prompt in self._prompts]
        batches = split(lengths, len(nodes))
        if len(batches) > 1 and nodes:
            self.weights, num_nodes = Counter(node.weights for node in nodes).most_common(1)[0]
            batches = split(lengths, num_nodes)
        waiting = iter(batches)
        num_workers = min(len(batches), _CALLS_PER_NODE * max(1, len(nodes)))
        workers = [asyncio.create_task(self._work(waiting)) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _usable(self) -> list[NodeView]:
        return [node for node in self._fleet.serving(self._options.task) if not node.stalled]

    async def _work(self, batches: Iterator[range]) -> None:
        for batch in batches:
            reply = await self._compute(batch)
            self._vectors[batch.start : batch.stop] = reply.vectors
            self.usage.cached_tokens += sum(reply.cached_tokens)
            self._metrics.cached_tokens.inc(sum(reply.cached_tokens))

    async def _compute(self, batch: range) -> pb.PoolReply:
        """Call nodes until one computes the batch. Failures are limited: a prompt must not crash all nodes."""
        attempts = self._attempts()
        while not self._suspect:
            try:
                return await self._call(batch)
            except EngineCrashed as exc:
                if not self._options.migrations:
                    raise
                self._count_move(batch, exc)
                self._suspect = True
                break
            except NodeError as exc:
                may_move = attempts.count_failure()
                self._most_failures = max(self._most_failures, attempts.num_failures)
                if not may_move:
                    text = f"{attempts.num_failures} prefill nodes failed under this request; the last one: {exc}"
                    raise NodeError(text) from exc
                self._count_move(batch, exc)
            except Overloaded:
                if attempts.expired:
                    raise
            if not attempts.begun:
                attempts.begin()
            await asyncio.sleep(attempts.next_pause())
        return await self._compute_alone(batch)

    def _attempts(self) -> NodeAttempts:
        return NodeAttempts(self._options.migrations, self._avoided, self._failures_before)

    async def _compute_alone(self, batch: range) -> pb.PoolReply:
        """Compute a batch of a request that an engine has ended with, while no other such batch runs.

        Raises CrashingRequest when another engine ends.
        """
        async with self._fleet.suspect_turn:
            attempts = self._attempts()
            attempts.begin()
            while True:
                try:
                    return await self._call(batch)
                except EngineCrashed as exc:
                    text = "the engines of two prefill nodes have ended while they computed these texts"
                    raise CrashingRequest(f"{text}; the last one: {exc}; report it with the nodes' logs") from exc
                except (NodeError, Overloaded):
                    if attempts.expired:
                        raise
                await asyncio.sleep(LONGEST_PAUSE)

    async def _call(self, batch: range) -> pb.PoolReply:
        """Call one node. Raises PdserveError; the node is then avoided for a while. Raises _WeightsGone."""
        options = self._options
        prompts = self._prompts[batch.start : batch.stop]
        lengths = [prompt.num_tokens for prompt in prompts]
        nodes = self._usable()
        if self.weights is not None and nodes and self.weights not in {node.weights for node in nodes}:
            raise _WeightsGone
        node = self._fleet.pooling_node(options.task, lengths, self._avoided.ids, self.weights)
        assert node.description is not None, "it was chosen by its view"
        weights = self.weights = node.description.weights
        node_id = node.description.node_id
        vector_size = options.dimensions or node.description.pooling.size
        span = options.span.child("pool", {"pdserve.prefill_node": node_id}, SpanKind.CLIENT)
        message = pb.PoolRequest(
            request_id=options.request_id,
            prompts=[prompt.token_ids for prompt in prompts],
            cache_salt=options.cache_salt,
            priority=options.priority,
            client=options.client_tag,
            traceparent=span.traceparent,
            tracestate=span.tracestate,
            dimensions=options.dimensions,
        )
        try:
            timeout = options.remaining + _DEADLINE_GRACE
            reply = await node.pool(message, sum(lengths), timeout, lambda: self._has_other(node_id))
            if reply.weights != weights:
                raise Overloaded(f"prefill node {node_id} has changed its weights; send the request again")
            _check(reply, len(batch), vector_size, node_id)
        except (NodeError, Overloaded) as exc:
            span.fail(exc)
            self._avoided.add(node_id)
            raise
        finally:
            span.end()
        return reply

    def _has_other(self, node_id: str) -> bool:
        return any(node.node_id != node_id for node in self._usable())

    def _count_move(self, batch: range, error: NodeError) -> None:
        self._metrics.migrations.labels(failure_reason(error)).inc(len(batch))
        fields = request_fields(self._options.request_id, self._options.span.trace_id)
        text = "request %s sends %d prompts to another node: %s"
        logger.warning(text, self._options.request_id, len(batch), error, extra=fields)


def _check(reply: pb.PoolReply, num_prompts: int, vector_size: int, node_id: str) -> None:
    """Raises NodeError for a reply that is not one finite vector per prompt."""
    if len(reply.vectors) != num_prompts or len(reply.cached_tokens) != num_prompts:
        raise NodeError(f"prefill node {node_id} sent {len(reply.vectors)} vectors for {num_prompts} prompts")
    wrong = next((len(vector) for vector in reply.vectors if len(vector) != vector_size * _VALUE_BYTES), None)
    if wrong is not None:
        raise NodeError(f"prefill node {node_id} sent a vector of {wrong} bytes; it has {vector_size} values")
    if not all(np.isfinite(np.frombuffer(vector, "<f4")).all() for vector in reply.vectors):
        raise NodeError(f"prefill node {node_id} sent values that are not finite; check its weights")
