"""The nodes behind this router: a snapshot for the policy, and the way from its answer to a call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from pdserve.pb import pdserve_pb2 as pb
from pdserve.tls import PeerTls
from router.call import CallSink
from router.job import Limits
from router.metrics import Metrics
from router.node_client import NodeClient
from router.policy import POLICIES, PREFIX_AWARE, Ask, NodeView, Placement, Snapshot, no_decode_node
from router.prefixes import CachedBlocks, PrefixIndex, PromptPrefix
from router.serve_stream import ServeStream

_INLINE_TOKENS = 16_384  # of a prompt: a millisecond of hashing


class Call:
    """A request at a decode node. Ends by ``finish``, ``cancel`` or a failure to the sink; the first one counts."""

    def __init__(
        self, node: NodeView, stream: ServeStream, number: int, decode: NodeClient, prefill: NodeClient | None
    ) -> None:
        self.node = node
        self._stream = stream
        self._number = number
        self._decode: NodeClient | None = decode
        self._prefill = prefill

    def prefilled(self) -> None:
        """The first token is there: P has done its part. Idempotent."""
        if self._prefill is not None:
            self._prefill.done()
            self._prefill = None

    def finish(self) -> None:
        self._leave()
        self._stream.finished(self._number)

    def cancel(self) -> None:
        self._leave()
        self._stream.cancel(self._number)

    def _leave(self) -> None:
        self.prefilled()
        if self._decode is not None:
            self._decode.done()
            self._decode = None


class Fleet:
    """All state is learnt from the nodes; a router that starts anew has it within seconds."""

    def __init__(
        self,
        model: str,
        prefill: Sequence[str],
        decode: Sequence[str],
        policy: str,
        metrics: Metrics,
        tls: PeerTls | None = None,
    ) -> None:
        self._model = model
        self._policy = policy
        self._metrics = metrics
        self._turn = random.getrandbits(32)  # routers that start together do not go in step
        self._watchers: list[Callable[[], None]] = []
        self._prefixes = PrefixIndex()
        roles = [("prefill", address) for address in prefill] + [("decode", address) for address in decode]
        self.nodes = [NodeClient(address, role, self._prefixes, self._changed, tls) for role, address in roles]

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self.nodes))

    def on_change(self, watcher: Callable[[], None]) -> None:
        self._watchers.append(watcher)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once ``condition`` holds; looked at whenever something changes."""
        while not condition():
            changed = asyncio.Event()
            self.on_change(changed.set)
            try:
                await changed.wait()
            finally:
                self._watchers.remove(changed.set)

    @property
    def ready(self) -> bool:
        """At least one decode node of the model is ready."""
        return any(v.ready and v.role == "decode" and v.model == self._model for v in self.snapshot().nodes)

    @property
    def complete(self) -> bool:
        """Every node that was named is ready."""
        return all(node.ready for node in self.nodes)

    def snapshot(self) -> Snapshot:
        views = tuple(view for node in self.nodes if (view := node.view()) is not None)
        return Snapshot(self._model, views, self._turn)

    def limits(self) -> Limits:
        """The smallest limits of the ready decode nodes. Raises Overloaded when none is ready."""
        ready = [
            node.description
            for node in self.nodes
            if node.role == "decode" and node.ready and node.description and node.description.model == self._model
        ]
        if not ready:
            raise no_decode_node(self.snapshot())
        return Limits(min(d.max_model_len for d in ready), min(d.vocab_size for d in ready))

    async def prepare(self, prefix: PromptPrefix) -> None:
        """Have a long prompt's chain computed on a thread, so that it does not hold up other streams."""
        if self._policy == PREFIX_AWARE and prefix.num_tokens > _INLINE_TOKENS:
            for size in {node.description.kv_layout.block_size for node in self.nodes if node.description}:
                if size:
                    await asyncio.to_thread(prefix.numbers, size)

    def generate(
        self,
        message: pb.Generate,
        sink: CallSink,
        accepts: Callable[[NodeView], bool] = lambda node: True,
        prefix: PromptPrefix | None = None,
    ) -> Call:
        """Place a request at a decode node that is accepted, and send it; ``prefix`` is that of its prompt.

        Raises Overloaded when none is ready.
        """
        snapshot = self.snapshot().among(accepts)
        ask = self._ask(prefix or PromptPrefix(message.token_ids, message.cache_salt))
        placement = POLICIES[self._policy](snapshot, ask)
        self._turn += 1
        decode, prefill = self._resolve(placement)
        message.prefill_node = placement.prefill or ""
        view = decode.view()
        assert decode.stream is not None, "a ready decode node has a stream"
        assert view is not None, "it was chosen by its view"
        number = decode.stream.generate(message, sink)
        self._account(ask, decode, prefill)
        return Call(view, decode.stream, number, decode, prefill)

    def _account(self, ask: Ask, decode: NodeClient, prefill: NodeClient | None) -> None:
        """Count a placement, and what it makes the nodes do."""
        computes = prefill or decode
        assert computes.description is not None
        node_id = computes.description.node_id
        computes.sent(ask.uncached(node_id), ask.num_tokens)
        if prefill is not None:
            decode.sent(0, ask.num_tokens)
        self._metrics.placements.labels(self._policy, "local" if prefill is None else "remote").inc()
        self._metrics.expected_cached_tokens.inc(ask.cached.get(node_id, 0))

    def _ask(self, prefix: PromptPrefix) -> Ask:
        """What the policy needs to know of a prompt: who has how much of it, if that matters."""
        if self._policy != PREFIX_AWARE:
            return Ask(prefix.num_tokens)
        cached: dict[str, int] = {}
        by_size: dict[int, dict[CachedBlocks, str]] = {}
        for node in self.nodes:
            described = node.description
            if described is not None and node.cached is not None and described.model == self._model:
                by_size.setdefault(described.kv_layout.block_size, {})[node.cached] = described.node_id
        for size, nodes in by_size.items():
            if size:
                most = (prefix.num_tokens - 1) // size  # the last token is always computed
                found = self._prefixes.match(prefix.numbers(size)[:most], nodes)
                cached.update((nodes[blocks], count * size) for blocks, count in found.items())
        return Ask(prefix.num_tokens, cached)

    def _resolve(self, placement: Placement) -> tuple[NodeClient, NodeClient | None]:
        by_id = {(node.role, node.description.node_id): node for node in self.nodes if node.description}
        prefill = None if placement.prefill is None else by_id["prefill", placement.prefill]
        return by_id["decode", placement.decode], prefill

    def _changed(self) -> None:
        for watcher in tuple(self._watchers):
            watcher()
