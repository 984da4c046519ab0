"""A frontend that sends an engine much waits for room, so that other commands come in between."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from node.engine_client.engine_process import EngineProcess
from node.engine_client.launched_engine import LaunchedEngine
from pdserve.ipc.frames import Frames
from pdserve.ipc.messages import MAX_PIXEL_PART, Ping, PutPixels, ToEngine

NUM_PARTS = 40


def launch() -> tuple[LaunchedEngine, socket.socket, socket.socket]:
    """Return an engine that takes no command, and its ends of the sockets; the test reads the first."""
    messages, theirs = socket.socketpair()
    heartbeats, other = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    theirs.setblocking(False)
    return LaunchedEngine(process, messages, heartbeats), theirs, other


class Reader:
    """The engine's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames: Frames[ToEngine] = Frames(ToEngine)
        self._messages: list[ToEngine] = []

    async def parts_before_ping(self) -> int:
        """Read up to a Ping. Return the number of parts of an image before it."""
        loop = asyncio.get_running_loop()
        parts = 0
        while True:
            while not self._messages:
                self._messages += self._frames.cut(await loop.sock_recv(self._socket, 1 << 16))
            if isinstance(self._messages.pop(0), Ping):
                return parts
            parts += 1


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[EngineProcess, socket.socket]]:
    """Yield the frontend's end of an engine, and the engine's socket."""
    launched, theirs, other = launch()
    client = EngineProcess(lambda message: None, lambda error: None)
    await client.take_over(launched)
    with launched.process, launched.messages, launched.heartbeats, theirs, other:
        yield client, theirs
        launched.process.kill()
        theirs.close()
        other.close()
        await client.end(1.0)


async def send_image(client: EngineProcess) -> None:
    for number in range(NUM_PARTS):
        await client.room()
        client.send(PutPixels(bytes(32), bytes(MAX_PIXEL_PART), last=number == NUM_PARTS - 1))


def test_a_command_waits_for_few_parts_of_an_image() -> None:
    async def scenario() -> None:
        async with engine() as (client, sock):
            reader = Reader(sock)
            sending = asyncio.create_task(send_image(client))
            for _ in range(NUM_PARTS):
                await asyncio.sleep(0)
            client.send(Ping())
            before = await reader.parts_before_ping()
            assert 1 <= before <= 3, "the socket and its buffer hold one part or two"
            sending.add_done_callback(lambda _: client.send(Ping()))
            assert before + await reader.parts_before_ping() == NUM_PARTS

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["socket", "process"])
def test_room_comes_when_the_engine_has_ended(how: str) -> None:
    async def scenario() -> None:
        async with engine() as (client, sock):
            client.send(PutPixels(bytes(32), bytes(4 * MAX_PIXEL_PART), last=True))
            waiting = asyncio.create_task(client.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            if how == "socket":
                sock.close()
            else:
                sock.shutdown(socket.SHUT_RDWR)
            await waiting

    asyncio.run(scenario())
