"""Port forwarding into a host's network: python port_forward.py FD=HOST:PORT …

Each FD is a listening socket of the root namespace. This process runs on a host and forwards each connection to
HOST:PORT, resolving the name for every connection.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def forward_to(host: str, port: int) -> Handler:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    return forward


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes and the end of the stream; if one connection breaks, abort the other one."""
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
        await asyncio.start_server(forward_to(host, int(port)), sock=socket.socket(fileno=int(fd)))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
