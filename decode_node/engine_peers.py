"""Connections of the engine's connector to prefill nodes, by epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.engine_client import EngineClient
from pdserve.errors import PeerError
from pdserve.ipc.messages import Connect, Disconnect
from pdserve.records import Peer
from pdserve.transports import Connected


class EnginePeers:
    """Makes a connection within ``timeout`` seconds; calls ``on_lost(epoch, reason)`` for each that breaks later."""

    def __init__(self, engine: EngineClient, timeout: float, on_lost: Callable[[str, str], None]) -> None:
        self._engine = engine
        self._timeout = timeout
        self._on_lost = on_lost
        self._connecting: dict[str, asyncio.Future[Connected]] = {}  # by epoch
        engine.on_connected = self._on_connected
        engine.on_failed_peer = self._on_failed

    async def connect(self, peer: Peer) -> Connected:
        """Have the connector connect. Raises PeerError when it cannot."""
        future: asyncio.Future[Connected] = asyncio.get_running_loop().create_future()
        self._connecting[peer.epoch] = future
        self._engine.send(Connect(peer))
        try:
            return await asyncio.wait_for(future, self._timeout)
        except TimeoutError as exc:
            raise PeerError(f"the connector did not connect within {self._timeout:.3g} s") from exc
        finally:
            self._connecting.pop(peer.epoch, None)

    def disconnect(self, epoch: str) -> None:
        """Drop the connection; its reads in flight end with an error."""
        self._engine.send(Disconnect(epoch))

    def _on_connected(self, connection: Connected) -> None:
        if (future := self._connecting.get(connection.epoch)) is not None and not future.done():
            future.set_result(connection)

    def _on_failed(self, epoch: str, reason: str) -> None:
        future = self._connecting.get(epoch)
        if future is None:
            self._on_lost(epoch, reason)
        elif not future.done():
            future.set_exception(PeerError(f"the connector cannot connect: {reason}"))
