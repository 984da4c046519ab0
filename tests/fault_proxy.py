"""A prefill node's gRPC endpoint with somebody in the middle: forwards to a real node and lets a test interfere.

The KV itself travels directly between the real nodes. Hooks run in the thread of the call: they may wait, or kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import channel_options, server_options

UNSET = "127.0.0.1:1"  # nobody listens there


class Refusal(Exception):
    """Raised by ``before_prefill``, ``before_extend`` or ``before_release``: the call ends with this status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code


class FaultProxy:
    """``target`` may be changed: the next calls go to the new one. Leaving it as a context manager stops it."""

    def __init__(self, target: str = UNSET) -> None:
        self.before_prefill: Callable[[], None]
        self.before_event: Callable[[str], None]  # given its kind: accepted, first_tokens or kv_ready
        self.before_extend: Callable[[], None]
        self.before_release: Callable[[], None]
        self.alter_event: Callable[[pb.PrefillEvent], Iterable[pb.PrefillEvent]]  # passed on instead
        self.alter_handshake: Callable[[pb.HandshakeReply], pb.HandshakeReply]
        self.reset()
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

    def reset(self) -> None:
        """Interfere no more."""
        self.before_prefill = lambda: None
        self.before_event = lambda kind: None
        self.before_extend = lambda: None
        self.before_release = lambda: None
        self.alter_event = lambda event: (event,)
        self.alter_handshake = lambda reply: reply

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

    def Prefill(self, request: pb.PrefillRequest, context: Any) -> Iterator[pb.PrefillEvent]:
        self._interfere(self._proxy.before_prefill, context)
        call = self._stub.Prefill(request)
        context.add_callback(call.cancel)
        try:
            for event in call:
                self._proxy.before_event(event.WhichOneof("kind") or "")
                yield from self._proxy.alter_event(event)
        except grpc.RpcError as exc:
            context.abort(exc.code(), exc.details())

    def Extend(self, request: pb.ExtendRequest, context: Any) -> pb.ExtendReply:
        self._interfere(self._proxy.before_extend, context)
        return _forward(self._stub.Extend, request, context)  # type: ignore[no-any-return]

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        self._interfere(self._proxy.before_release, context)
        return _forward(self._stub.Release, request, context)  # type: ignore[no-any-return]

    def _interfere(self, hook: Callable[[], None], context: Any) -> None:
        try:
            hook()
        except Refusal as exc:
            context.abort(exc.code, "refused by the test")


def _forward(method: Any, request: Any, context: Any) -> Any:
    try:
        return method(request, timeout=5.0)
    except grpc.RpcError as exc:
        context.abort(exc.code(), exc.details())
