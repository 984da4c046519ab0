"""Limits of WebSocket connections, over TCP with the client of the package websockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from pdserve.http.connections import ConnectionLimit
from router import websocket_connections
from router.websocket_connections import MessageMemory, WebSocketConnection

SECONDS = 20  # longest wait for an event that must come


class Server:
    """``received``: messages that the application took; it takes one for each release of ``takes``."""

    def __init__(self, maximum: int = 10, memory: int = 1_000_000, stall_timeout: float = 60.0) -> None:
        self.connections: list[WebSocketConnection] = []
        self.events: list[str] = []
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.takes = asyncio.Semaphore(0)
        self.memory = MessageMemory(memory)
        self.says: bytes | None = None  # and ends
        self._config = uvicorn.Config(
            self._app,
            interface="asgi3",
            log_config=None,
            ws_max_size=500_000,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
        )
        self._limit = ConnectionLimit(maximum, lambda: self.events.append("evicted"))
        self._stall_timeout = stall_timeout

    def connection(self) -> WebSocketConnection:
        made = WebSocketConnection(
            self._config,
            ServerState(),
            {},
            limit=self._limit,
            memory=self.memory,
            stall_timeout=self._stall_timeout,
            on_stall=lambda: self.events.append("stalled"),
        )
        self.connections.append(made)
        return made

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while True:
            await self.takes.acquire()
            if self.says is not None:
                await send({"type": "websocket.send", "bytes": self.says})
                return
            message = await receive()
            self.received.put_nowait(message)
            if message["type"] == "websocket.disconnect":
                return


@asynccontextmanager
async def clients_of(server: Server) -> AsyncIterator[Callable[[], Coroutine[Any, Any, ClientConnection]]]:
    listener = await asyncio.get_running_loop().create_server(server.connection, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    opened: list[ClientConnection] = []

    async def client() -> ClientConnection:
        opened.append(await connect(f"ws://{host}:{port}/", proxy=None, compression=None, ping_interval=None))
        return opened[-1]

    try:
        async with asyncio.timeout(3 * SECONDS):
            yield client
    finally:
        for connection in opened:
            connection.transport.abort()
        listener.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def close_code(client: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(client.recv(), SECONDS)
    return None if caught.value.rcvd is None else caught.value.rcvd.code


async def part(*fragments: bytes) -> AsyncIterator[bytes]:
    """The first fragments of a message; the others never come."""
    for fragment in fragments:
        yield fragment
    await asyncio.Event().wait()


def test_message_of_too_many_fragments_closes_the_connection() -> None:
    async def run() -> None:
        server = Server()
        async with clients_of(server) as client:
            one = await client()
            sending = asyncio.create_task(one.send(part(*[b"x"] * 10_000)))
            assert await close_code(one) == 1009
            sending.cancel()

    asyncio.run(run())


def test_unfinished_message_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connections, "BODY_SECONDS", 0.05)

    async def run() -> None:
        async with clients_of(Server()) as client:
            one = await client()
            sending = asyncio.create_task(one.send(part(b"x")))
            assert await close_code(one) is None
            sending.cancel()

    asyncio.run(run())


def test_unread_part_of_a_message_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is busy, so the connection is not read."""
    monkeypatch.setattr(websocket_connections, "BODY_SECONDS", 0.05)

    async def run() -> None:
        server = Server()
        async with clients_of(server) as client:
            one = await client()
            whole = b"\x82\x81" + bytes(4) + b"x"
            one.transport.write(whole + whole[:3])
            await asyncio.sleep(0.2)
            assert not server.connections[0].disconnected

    asyncio.run(run())


def test_memory_of_messages_is_bounded() -> None:
    async def run() -> None:
        server = Server(memory=200_000)
        async with clients_of(server) as client:
            holding, small, large = [await client() for _ in range(3)]
            sending = asyncio.create_task(holding.send(part(b"x" * 190_000)))
            await until(lambda: server.memory.num_bytes >= 190_000)
            await small.send(b"y" * 20_000)
            server.takes.release()
            large_sending = asyncio.create_task(large.send(part(b"z" * 100_000)))
            assert await close_code(large) == 1013
            holding.transport.abort()
            large.transport.abort()
            for task in (sending, large_sending):
                task.cancel()
            await until(lambda: server.memory.num_bytes <= 21_000)
            server.takes.release()
            server.takes.release()
            server.takes.release()
            await small.close()
            await until(lambda: server.memory.num_bytes == 0)

    asyncio.run(run())


def test_empty_messages_count_in_the_memory_of_messages() -> None:
    """About 40,000 empty messages fit into the bytes that a connection receives at once."""

    async def run() -> None:
        server = Server(memory=200_000)
        async with clients_of(server) as client:
            one = await client()
            one.transport.write((b"\x82\x80" + bytes(4)) * 10_000)
            assert await close_code(one) == 1013

    asyncio.run(run())


def test_pongs_do_not_pile_up_while_the_client_reads_nothing() -> None:
    async def run() -> None:
        server = Server()
        async with clients_of(server) as client:
            one = await client()
            connection = server.connections[0]
            one.transport.pause_reading()
            connection.transport.write(b"\x82\x7f" + (20_000_000).to_bytes(8, "big") + bytes(20_000_000))  # a message
            assert not connection.writable.is_set()
            await asyncio.sleep(0.05)
            unread = connection.transport.get_write_buffer_size()
            for _ in range(5_000):
                await one.ping()
            await one.send(b"last")
            server.takes.release()
            await server.received.get()
            assert 0 < connection.transport.get_write_buffer_size() <= unread

    asyncio.run(run())


def test_client_that_reads_nothing_is_disconnected() -> None:
    async def run() -> None:
        server = Server(stall_timeout=0.05)
        async with clients_of(server) as client:
            one = await client()
            one.transport.pause_reading()
            server.says = bytes(20_000_000)
            server.takes.release()
            await until(lambda: server.connections[0].disconnected)
            assert server.events == ["stalled"]

    asyncio.run(run())


def test_connection_about_to_close_gives_way_to_a_new_one() -> None:
    async def run() -> None:
        server = Server(maximum=1)
        async with clients_of(server) as client:
            one = await client()
            await one.send(b"x")
            await until(lambda: server.memory.num_bytes > 0)
            one.transport.pause_reading()
            server.says = bytes(20_000_000)
            server.takes.release()
            await until(server.connections[0].transport.is_closing)
            await client()
            assert server.events == ["evicted"]

    asyncio.run(run())
