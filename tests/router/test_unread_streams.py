"""Memory that the router holds for streams whose clients do not read."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
import uvicorn
import uvloop
from certificates import write_https
from machine import patience
from router_process import RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode
from test_connections import stream_request
from uvicorn.server import ServerState

from pdserve.http.connections import BUFFER_BYTES, BoundedConnection, ConnectionLimit, listen

NUM_STREAMS = 40
EVENT = b"x" * 200
NUM_EVENTS = 20_000
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def ask(router: RouterProcess, salt: str) -> socket.socket:
    """Ask for a stream over a connection whose kernel keeps little of it."""
    host, _, port = router.address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(patience(20))
    sock.connect((host, int(port)))
    sock.sendall(stream_request(salt))
    return sock


def test_unread_streams_hold_no_more_than_documented(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    """A stream holds 40 KiB of objects, 64 KiB of events and 64 KiB in the connection; the allocator adds half."""
    conversations: list[Conversation] = []

    async def talk(conversation: Conversation) -> None:
        conversations.append(conversation)
        while not conversation.cancelled.is_set():
            for _ in range(0 if conversation.paused else 5):
                conversation.token(65)
            await asyncio.sleep(patience(0.02))

    scripted_node.scripts["talk"] = talk
    with router_process(tokenizer_dir, ["--decode", scripted_node.address]) as router, ExitStack() as stack:
        with ask(router, "talk") as first:  # creates the objects that later streams share
            assert b" 200 " in first.recv(4096)
        wait_for(lambda: conversations[0].cancelled.is_set())
        process = psutil.Process(router.pid)
        before = process.memory_info().rss
        for _ in range(NUM_STREAMS):
            stack.enter_context(ask(router, "talk"))
        wait_for(lambda: sum(conversation.paused for conversation in conversations) == NUM_STREAMS, 60.0)
        held = (process.memory_info().rss - before) / NUM_STREAMS
        assert held < 1.5 * (40 + 64 + 64) * 1024


def contexts_in(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a server's and a client's."""
    ca = trustme.CA()
    cert = folder / "cert.pem"
    key = folder / "key.pem"
    write_https(cert, key, ca)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    client = ssl.create_default_context()
    server.load_cert_chain(cert, key)
    ca.configure_trust(client)
    return server, client


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_connection_holds_a_bounded_part_of_a_stream_and_loses_none(tmp_path: Path, tls: bool) -> None:

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(NUM_EVENTS):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None)
        connections: list[BoundedConnection] = []

        def connection() -> BoundedConnection:
            connections.append(BoundedConnection(config, ServerState(), {}, limit=ConnectionLimit(1)))
            return connections[-1]

        server_context, client_context = contexts_in(tmp_path) if tls else (None, None)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(patience(30)):
            server = await loop.create_server(connection, sock=listen("127.0.0.1", 0, "--port"), ssl=server_context)
            address = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(*address, ssl=client_context, limit=4096)
            writer.write(REQUEST)
            while not (connections and connections[0].flow is not None and connections[0].flow.write_paused):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            waiting = connections[0].transport.get_write_buffer_size()
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += await reader.read(1 << 20)
            writer.transport.abort()
            server.close()
        assert BUFFER_BYTES < waiting < BUFFER_BYTES + 2 * len(EVENT)
        assert answer.count(EVENT) == NUM_EVENTS

    uvloop.run(run())
