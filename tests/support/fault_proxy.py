"""A gRPC proxy in front of a real prefill node, through which a test injects faults.

KV travels directly between the real nodes. The proxy forwards each message of a stream separately, and a handoff's
messages in order. Hooks run in a thread per handoff and direction, so a hook that waits delays its own handoff only.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from functools import partial
from typing import Any

import grpc
from machine import patience

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.channel import channel_options, server_options

UNSET = "127.0.0.1:1"  # nothing listens there
ANNOUNCED = ("accepted", "first_tokens", "kv_ready")


class Refusal(Exception):
    """Raised by ``before_prefill``, ``before_extend`` or ``before_release``: D receives a Failure, P nothing."""

    def __init__(self, code: pb.Failure.Code.ValueType) -> None:
        self.code = code


class Lost(Exception):
    """Raised by hooks: the message is lost."""


class FaultProxy:
    """Later calls go to a changed ``target``. Leaving the context stops the proxy."""

    def __init__(self, target: str = UNSET) -> None:
        self.before_prefill: Callable[[], None]
        self.before_event: Callable[[str], None]  # called with a kind of ANNOUNCED
        self.before_extend: Callable[[], None]
        self.before_release: Callable[[], None]
        self.alter_request: Callable[[pb.HandoffRequest], Iterable[pb.HandoffRequest]]  # forwarded instead
        self.alter_event: Callable[[pb.PrefillEvent], Iterable[pb.PrefillEvent]]  # for kinds of ANNOUNCED
        self.alter_handshake: Callable[[pb.HandshakeReply], pb.HandshakeReply]
        self.reset()
        self.threads = futures.ThreadPoolExecutor(64)
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=server_options())
        pb_grpc.add_NodeServicer_to_server(_Node(self), self._server)
        pb_grpc.add_PrefillNodeServicer_to_server(_PrefillNode(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._channels: dict[str, grpc.Channel] = {}
        self.target = target
        self._server.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(0).wait()
        for channel in self._channels.values():
            channel.close()
        self.threads.shutdown(cancel_futures=True)

    def reset(self) -> None:
        """Remove all hooks."""
        self.before_prefill = lambda: None
        self.before_event = lambda kind: None
        self.before_extend = lambda: None
        self.before_release = lambda: None
        self.alter_request = lambda request: (request,)
        self.alter_event = lambda event: (event,)
        self.alter_handshake = lambda reply: reply

    def before(self, kind: str) -> None:
        """Run the hook before a request of D."""
        {"prefill": self.before_prefill, "extend": self.before_extend, "release": self.before_release}.get(
            kind, lambda: None
        )()

    @property
    def channel(self) -> grpc.Channel:
        if self.target not in self._channels:
            self._channels[self.target] = grpc.insecure_channel(self.target, options=channel_options())
        return self._channels[self.target]


class _Node(pb_grpc.NodeServicer):
    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        return _forward(pb_grpc.NodeStub(self._proxy.channel).Describe, request, context)  # type: ignore[no-any-return]

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.NodeReport]:
        yield from pb_grpc.NodeStub(self._proxy.channel).Watch(request)

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return _forward(pb_grpc.NodeStub(self._proxy.channel).Status, request, context)  # type: ignore[no-any-return]


class _PrefillNode(pb_grpc.PrefillNodeServicer):
    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy

    @property
    def _stub(self) -> pb_grpc.PrefillNodeStub:
        return pb_grpc.PrefillNodeStub(self._proxy.channel)

    def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
        return self._proxy.alter_handshake(_forward(self._stub.Handshake, request, context))

    def Serve(self, request_iterator: Iterator[pb.HandoffRequest], context: Any) -> Iterator[pb.PrefillEvents]:
        relay = _Relay(self._proxy, self._stub, request_iterator)
        context.add_callback(relay.cancel)
        try:
            yield from relay.events()
        except grpc.RpcError as exc:
            context.abort(exc.code(), exc.details())


class _Relay:
    """One stream of a D, and its counterpart to P."""

    def __init__(self, proxy: FaultProxy, stub: pb_grpc.PrefillNodeStub, requests: Iterator[pb.HandoffRequest]) -> None:
        self._proxy = proxy
        self._to_p: queue.SimpleQueue[pb.HandoffRequest | None] = queue.SimpleQueue()
        self._to_d: queue.SimpleQueue[pb.PrefillEvents | Exception | None] = queue.SimpleQueue()
        self._requests = requests
        self._call: Any = stub.Serve(iter(self._to_p.get, None))
        for work in (self._read_requests, self._read_events):
            threading.Thread(target=work, daemon=True).start()

    def events(self) -> Iterator[pb.PrefillEvents]:
        """Yield messages for D until either side has ended the stream."""
        while (message := self._to_d.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    def cancel(self) -> None:
        self._call.cancel()
        self._to_p.put(None)

    def _read_requests(self) -> None:
        lanes = _Lanes(self._proxy.threads, self._to_d.put)
        try:
            for request in self._requests:
                kind = request.WhichOneof("kind") or ""
                lanes.put(getattr(request, kind).request, partial(self._forward_request, kind, request))
            lanes.wait()
        except Exception:  # gRPC's for a stream that broke
            self._call.cancel()
        self._to_p.put(None)

    def _read_events(self) -> None:
        lanes = _Lanes(self._proxy.threads, self._to_d.put)
        try:
            for message in self._call:
                for event in message.events:  # a delayed announcement does not delay an answer
                    lanes.put((event.request, _is_answer(event)), partial(self._forward_event, event))
            lanes.wait()
        except grpc.RpcError as exc:
            self._to_d.put(exc)
        self._to_d.put(None)

    def _forward_request(self, kind: str, request: pb.HandoffRequest) -> None:
        try:
            self._proxy.before(kind)
        except Refusal as exc:
            failure = pb.Failure(code=exc.code, message="refused by the test")
            self._send(pb.PrefillEvent(request=getattr(request, kind).request, failed=failure))
        except Lost:
            pass
        else:
            for altered in self._proxy.alter_request(request):
                self._to_p.put(altered)

    def _forward_event(self, event: pb.PrefillEvent) -> None:
        kind = event.WhichOneof("kind") or ""
        number = event.request
        if kind not in ANNOUNCED:
            self._send(event)
            return
        self._proxy.before_event(kind)
        for altered in self._proxy.alter_event(event):
            altered.request = number
            self._send(altered)

    def _send(self, event: pb.PrefillEvent) -> None:
        self._to_d.put(pb.PrefillEvents(events=[event]))


def _is_answer(event: pb.PrefillEvent) -> bool:
    return event.WhichOneof("kind") in ("extended", "released")


class _Lanes:
    """Runs work in order within each lane, lanes in parallel. ``on_error`` receives exceptions."""

    def __init__(self, threads: futures.Executor, on_error: Callable[[Exception], None]) -> None:
        self._threads = threads
        self._on_error = on_error
        self._lanes: dict[object, deque[Callable[[], None]]] = {}  # lanes with work
        self._changed = threading.Condition()

    def put(self, lane: object, work: Callable[[], None]) -> None:
        with self._changed:
            if lane in self._lanes:
                self._lanes[lane].append(work)
                return
            self._lanes[lane] = deque([work])
        self._threads.submit(self._run, lane)

    def wait(self) -> None:
        """Wait until all work is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lanes)

    def _run(self, lane: object) -> None:
        while True:
            with self._changed:
                if not self._lanes[lane]:
                    del self._lanes[lane]
                    self._changed.notify_all()
                    return
                work = self._lanes[lane].popleft()
            try:
                work()
            except Exception as exc:
                self._on_error(exc)


def _forward(method: Any, request: Any, context: Any) -> Any:
    try:
        return method(request, timeout=patience(5.0))
    except grpc.RpcError as exc:
        context.abort(exc.code(), exc.details())
