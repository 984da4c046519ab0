"""Entries that are written together travel together, and a peer that does not read delays further ones."""

from __future__ import annotations

import asyncio

from node.streams.stream_writer import StreamWriter


def test_entries_are_batched_into_one_message() -> None:
    async def run() -> None:
        writer: StreamWriter[list[int]] = StreamWriter(list)
        writer.put().append(1)
        writer.put().append(2)
        assert not writer.empty
        assert await writer.take() == [1, 2]
        assert writer.empty
        writer.wake()
        assert await writer.take() is None

    asyncio.run(run())


def test_room_waits_until_the_peer_has_read() -> None:
    async def run() -> None:
        writer: StreamWriter[list[int]] = StreamWriter(list)
        await writer.room()
        for number in range(1 << 16):
            writer.put().append(number)
        room = asyncio.ensure_future(writer.room())
        await asyncio.sleep(0)
        assert not room.done()
        while not writer.empty:
            await writer.take()
        await asyncio.wait_for(room, 5.0)

    asyncio.run(run())
