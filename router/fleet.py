"""The nodes behind this router: a snapshot for the policy, and the way from its answer to a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdserve.pb import pdserve_pb2 as pb
from pdserve.tls import PeerTls
from router.call import CallSink
from router.job import Limits
from router.node_client import NodeClient
from router.policy import NodeView, Placement, Snapshot, choose, no_decode_node
from router.serve_stream import ServeStream


class Call:
    """A request at a decode node. Ends by ``finish``, ``cancel`` or a failure to the sink; the first one counts."""

    def __init__(self, node: NodeView, stream: ServeStream, number: int, prefill: NodeClient | None) -> None:
        self.node = node
        self._stream = stream
        self._number = number
        self._prefill = prefill

    def prefilled(self) -> None:
        """The first token is there: P has done its part. Idempotent."""
        if self._prefill is not None:
            self._prefill.prefilling -= 1
            self._prefill = None

    def finish(self) -> None:
        self.prefilled()
        self._stream.finished(self._number)

    def cancel(self) -> None:
        self.prefilled()
        self._stream.cancel(self._number)


class Fleet:
    """All state is learnt from the nodes; a router that starts anew has it within seconds."""

    def __init__(self, model: str, prefill: Sequence[str], decode: Sequence[str], tls: PeerTls | None = None) -> None:
        self._model = model
        self._turn = 0
        self._watchers: list[Callable[[], None]] = []
        self.nodes = [NodeClient(address, "prefill", self._changed, tls) for address in prefill]
        self.nodes += [NodeClient(address, "decode", self._changed, tls) for address in decode]

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

    def generate(
        self, message: pb.Generate, sink: CallSink, accepts: Callable[[NodeView], bool] = lambda node: True
    ) -> Call:
        """Place a request at a decode node that is accepted, and send it. Raises Overloaded when none is ready."""
        snapshot = self.snapshot().among(accepts)
        placement = choose(snapshot)
        self._turn += 1
        stream, prefill = self._resolve(placement)
        message.prefill_node = placement.prefill or ""
        number = stream.generate(message, sink)
        if prefill is not None:
            prefill.prefilling += 1
        node = next(node for node in snapshot.nodes if (node.role, node.node_id) == ("decode", placement.decode))
        return Call(node, stream, number, prefill)

    def _resolve(self, placement: Placement) -> tuple[ServeStream, NodeClient | None]:
        by_id = {(node.role, node.description.node_id): node for node in self.nodes if node.description}
        stream = by_id["decode", placement.decode].stream
        assert stream is not None, "a ready decode node has a stream"
        return stream, None if placement.prefill is None else by_id["prefill", placement.prefill]

    def _changed(self) -> None:
        for watcher in tuple(self._watchers):
            watcher()
