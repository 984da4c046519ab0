"""Connections of the engine's connector, by epoch: orders go one way, answers come back as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.frontend.engine_client import EngineClient
from engine.ipc.messages import Connect, Disconnect
from pdserve.errors import PeerError
from pdserve.records import Peer
from pdserve.transports import Connected


class EnginePeers:
    """``on_lost(epoch, reason)`` is told of connections that break after they were made; ``seconds`` is to make one."""

    def __init__(self, engine: EngineClient, seconds: float, on_lost: Callable[[str, str], None]) -> None:
        self._engine = engine
        self._seconds = seconds
        self._on_lost = on_lost
        self._waiting: dict[str, asyncio.Future[Connected]] = {}  # by epoch
        engine.on_connected = self._connected
        engine.on_failed_peer = self._failed

    async def connect(self, peer: Peer) -> Connected:
        """Have the connector connect. Raises PeerError when it cannot."""
        future: asyncio.Future[Connected] = asyncio.get_running_loop().create_future()
        self._waiting[peer.epoch] = future
        self._engine.send(Connect(peer))
        try:
            return await asyncio.wait_for(future, self._seconds)
        except TimeoutError as exc:
            raise PeerError(f"the connector did not connect within {self._seconds:.3g} s") from exc
        finally:
            self._waiting.pop(peer.epoch, None)

    def disconnect(self, epoch: str) -> None:
        """Forget that life of a peer: its reads in flight end with an error."""
        self._engine.send(Disconnect(epoch))

    def _connected(self, connection: Connected) -> None:
        if (future := self._waiting.get(connection.epoch)) is not None and not future.done():
            future.set_result(connection)

    def _failed(self, epoch: str, reason: str) -> None:
        future = self._waiting.get(epoch)
        if future is None:
            self._on_lost(epoch, reason)
        elif not future.done():
            future.set_exception(PeerError(f"the connector cannot connect: {reason}"))
