"""One prompt at a prefill node, seen from D."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from decode_node.background import Background
from decode_node.handoff import Extended
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import error_from_rpc

_log = logging.getLogger(__name__)

PrefillEvent = pb.FirstTokens | pb.KVReady | Extended | PdserveError

_EXTEND_SECONDS = 2.0  # for one Extend call
_RELEASE_SECONDS = 5.0  # for one Release call
_ACCEPT_SECONDS = 2.0  # for P to name the lease of a call that is given up


class RemotePrefill:
    """A Prefill call and the lease it may become, as an async context manager.

    However it is left, P gets back what it still holds for this prompt: the call is cancelled and the lease released,
    in the background. ``on_event`` is given what P says, in its order, and at the end the reason why there is no more;
    between these also the answers to ``extend``. Errors are those of pdserve.errors.
    """

    def __init__(
        self,
        stub: pb_grpc.PrefillNodeAsyncStub,
        peer: str,
        request: pb.PrefillRequest,
        timeout: float | None,
        background: Background,
        on_event: Callable[[PrefillEvent], None],
    ) -> None:
        self._stub = stub
        self._peer = peer
        self._epoch = request.epoch
        self._request = request
        self._timeout = timeout
        self._background = background
        self._on_event = on_event
        self._accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._released = False

    async def __aenter__(self) -> Self:
        # A task of its own reads the call: cancelling whoever reads a call would cancel the call, lease unknown.
        self._reader = self._background.start(self._read(), f"prefill at {self._peer}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            self._background.start(self._give_back(), f"give back to {self._peer}")

    def extend(self) -> None:
        """Ask P to keep the lease; the answer is an event."""
        self._background.start(self._extend(), f"extend the lease at {self._peer}")

    async def release(self) -> bool:
        """Give the lease back. Returns whether all of it was kept until then: only if so may anything be used."""
        lease = await asyncio.shield(self._accepted)
        try:
            reply = await self._stub.Release(
                pb.ReleaseRequest(epoch=self._epoch, lease=lease), timeout=_RELEASE_SECONDS
            )
        except grpc.aio.AioRpcError as exc:
            raise error_from_rpc(exc, self._peer) from exc
        self._released = True
        return bool(reply.stood)

    async def _read(self) -> None:
        call = self._stub.Prefill(self._request, timeout=self._timeout)
        try:
            async for event in call:
                match event.WhichOneof("kind"):
                    case "accepted":
                        self._accepted.set_result(event.accepted.lease)
                    case "first_tokens":
                        self._on_event(event.first_tokens)
                    case "kv_ready":
                        self._on_event(event.kv_ready)
        except grpc.aio.AioRpcError as exc:
            error = error_from_rpc(exc, self._peer)
            error.__cause__ = exc
            self._end(error)
        finally:  # also when the channel was closed, which cancels its calls
            self._end(PeerError(f"{self._peer} ended a prefill without leasing its blocks"))

    def _end(self, error: PdserveError) -> None:
        self._on_event(error)
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # whoever waits is told; nobody waiting is no mistake

    async def _extend(self) -> None:
        lease, asked_at = self._accepted.result(), time.monotonic()  # blocks of it have been announced
        try:
            reply = await self._stub.Extend(pb.ExtendRequest(epoch=self._epoch, lease=lease), timeout=_EXTEND_SECONDS)
        except grpc.aio.AioRpcError as exc:
            self._on_event(Extended(asked_at, 0.0, error_from_rpc(exc, self._peer)))
        else:
            self._on_event(Extended(asked_at, reply.lease_ms / 1000))

    async def _give_back(self) -> None:
        """Cancel the call and release the lease, be it granted before, after or never."""
        await asyncio.wait([self._accepted], timeout=_ACCEPT_SECONDS)
        self._reader.cancel()
        if not self._accepted.done() or self._accepted.exception() is not None:
            return
        try:
            await self.release()
        except PeerError as exc:
            _log.info("a lease is left to expire: %s", exc)
