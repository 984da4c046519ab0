"""D's stream to one epoch of a prefill node, which carries all handoffs from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from node.reading.handoff import ToPeer
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import Peer
from pdserve.rpc.multiplexed_stream import MultiplexedStream

_CLOSE_SECONDS = 2.0  # between the last message and the cancellation of the call, for P to receive released leases

Handler = Callable[[pb.PrefillEvent | PeerError], None]


class PeerStream(MultiplexedStream[pb.HandoffRequest, pb.PrefillEvents, pb.PrefillEvent, Handler]):
    """Each prompt has a handler, called with P's events in their order, and with a PeerError if the stream ends."""

    def __init__(
        self, stub: pb_grpc.PrefillNodeAsyncStub, peer: Peer, *, max_request: int, on_change: Callable[[], None]
    ) -> None:
        """``max_request`` is what P accepts, in bytes."""
        super().__init__(
            stub.Serve,
            node=peer.node_id,
            max_request=max_request,
            linger=_CLOSE_SECONDS,
            on_change=on_change,
        )
        self.peer = peer

    def prefill(self, request: pb.PrefillRequest, handler: Handler) -> int:
        """Send a prompt; set its number and P's epoch, and return the number.

        Raises PeerError when the stream has ended, Draining when P drains, Overloaded when P does not read,
        RequestError when P takes no prompt of this size.
        """
        self._check_open()
        request.request = number = next(self._numbers)
        request.epoch = self.peer.epoch
        self._begin(number, handler, [pb.HandoffRequest(prefill=request)])
        return number

    def send(self, message: ToPeer) -> None:
        """Queue a message about a prompt; it is lost if the stream has ended."""
        match message:
            case pb.ExtendRequest():
                self._send(pb.HandoffRequest(extend=message))
            case pb.ReleaseRequest():
                self._send(pb.HandoffRequest(release=message))

    def _entries(self, batch: pb.PrefillEvents) -> Sequence[pb.PrefillEvent]:
        return batch.events

    def _deliver(self, handler: Handler, entry: pb.PrefillEvent) -> None:
        handler(entry)

    def _fail(self, handler: Handler, error: PdserveError) -> None:
        assert isinstance(error, PeerError)
        handler(error)

    def _end_error(self, reason: str) -> PeerError:
        return PeerError(f"{self._node}: {reason}")
