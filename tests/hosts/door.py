"""A way from outside onto a host's network: python door.py FD=HOST:PORT …

Each FD is a listening socket of the network outside; whoever connects to it is connected to HOST:PORT by this process,
which is on a host. The name is looked up for every connection.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable

Visitor = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def lead_to(host: str, port: int) -> Visitor:
    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    return visit


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end, which is passed on; a connection that breaks takes the other one along."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


async def main(words: list[str]) -> None:
    for word in words:
        fd, _, target = word.partition("=")
        host, _, port = target.rpartition(":")
        await asyncio.start_server(lead_to(host, int(port)), sock=socket.socket(fileno=int(fd)))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
