"""Uploads of pixels: which the node refuses, and that no upload costs memory for longer than its prompts need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from image_node import BUDGET, CELL, FINGERPRINT, PIECE, ImageNode, Picture, image_node, prompt_with

from node.health import NodeState
from node.images import service, uploads
from pdserve.ipc.messages import DropPixels, PutPixels
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

SMALL = Picture(2, 3, value=1)
LARGE = Picture(100, 100, value=2)  # 480 kB: two parts
OTHER = Picture(100, 100, value=3)
Scenario = Callable[[ImageNode], Awaitable[None]]


def run(checkpoint: Path, scenario: Scenario, **options: Any) -> None:
    async def body() -> None:
        async with image_node(checkpoint, **options) as node:
            await scenario(node)

    asyncio.run(body())


def pieces_of(header: pb.ImageHeader, *data: bytes) -> list[pb.ImagePiece]:
    return [pb.ImagePiece(header=header), *(pb.ImagePiece(data=part) for part in data)]


def test_pixels_reach_the_engine_in_parts_and_unchanged(checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        await node.put(LARGE.pieces(size=100_000))
        assert node.engine.pixels() == {LARGE.digest: LARGE.pixels}
        parts = [message for message in node.engine.sent if isinstance(message, PutPixels)]
        assert [len(part.data) for part in parts] == [PIECE, len(LARGE.pixels) - PIECE]
        assert node.uploads.num_bytes == len(LARGE.pixels)

    run(checkpoint, scenario)


#: Streams that no router sends, and words of the refusal.
HOSTILE: dict[str, tuple[list[pb.ImagePiece], str]] = {
    "nothing": ([], "without a header"),
    "no header": ([pb.ImagePiece(data=b"abc")], "must come in the first message"),
    "two headers": ([*SMALL.pieces(), pb.ImagePiece(header=SMALL.header())], "and only there"),
    "short digest": (pieces_of(SMALL.header(digest=b"abc")), "digest has 3 bytes, not 32"),
    "wrong digest": (
        pieces_of(SMALL.header(digest=OTHER.digest), SMALL.pixels),
        f"have the digest {SMALL.digest.hex()}, the header says {OTHER.digest.hex()}",
    ),
    "changed pixel": (pieces_of(SMALL.header(), SMALL.pixels[:-1] + b"\7"), f"the header says {SMALL.digest.hex()}"),
    "swapped sides": (
        pieces_of(SMALL.header(height=SMALL.width, width=SMALL.height), SMALL.pixels),
        "have the digest",
    ),
    "other processor": (pieces_of(SMALL.header(fingerprint=bytes(32))), f"{bytes(32).hex()} is not that of"),
    "long fingerprint": (pieces_of(SMALL.header(fingerprint=bytes(100_000))), FINGERPRINT.hex()),
    "height 0": (pieces_of(SMALL.header(height=0)), "height is 0"),
    "odd width": (pieces_of(SMALL.header(width=13)), f"width 13 is not a multiple of {CELL} pixels"),
    "endless side": (pieces_of(SMALL.header(height=1 << 31)), "height is 2147483648"),
    "long side": (pieces_of(SMALL.header(height=4 * 4097)), "height 16388 is not a multiple of 4 pixels, up to 16384"),
    "too many pixels": (pieces_of(SMALL.header(height=1 << 12, width=1 << 12)), "takes 1048576 at most"),
    "too few bytes": (pieces_of(SMALL.header(), SMALL.pixels[:-1]), "ended after 287 bytes of pixels"),
    "too many bytes": (pieces_of(SMALL.header(), SMALL.pixels, b"x"), "289 bytes of pixels have arrived"),
    "far too many bytes": (pieces_of(SMALL.header(), *[bytes(PIECE)] * 8), "262144 bytes of pixels have arrived"),
    "large piece": (pieces_of(LARGE.header(), LARGE.pixels), "data has 480000 bytes, the limit is 262144"),
    "header only": (pieces_of(SMALL.header()), "ended after 0 bytes of pixels"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stream_that_is_no_image_is_refused_and_costs_nothing(name: str, checkpoint: Path) -> None:
    stream, words = HOSTILE[name]

    async def scenario(node: ImageNode) -> None:
        status, details = await node.refused(stream)
        assert status == "INVALID_ARGUMENT", details
        assert words in details
        assert len(details) < 1000
        assert node.idle()
        assert not node.engine.sent
        assert node.context.violations.count == 1
        assert node.uploads.counts["refused"] == 1
        await node.put(SMALL.pieces())
        assert node.engine.pixels() == {SMALL.digest: SMALL.pixels}, "the next image is stored"

    run(checkpoint, scenario)


def test_a_lying_upload_takes_no_pixels_of_an_honest_one(checkpoint: Path) -> None:
    """It claims the digest of an image that arrives beside it. Once the node has the image, it reads nothing more."""

    async def scenario(node: ImageNode) -> None:
        lie = pieces_of(LARGE.header(), OTHER.pixels[:PIECE], OTHER.pixels[PIECE:])
        stub: Any = pb_grpc.ImageNodeStub(node.channel)
        calls = [stub.Put(), stub.Put()]
        for call in calls:
            for piece in lie[:2]:
                await call.write(piece)
        await node.until(lambda: node.uploads.num_bytes == 2 * len(LARGE.pixels))
        await calls[0].write(lie[2])
        await calls[0].done_writing()
        assert await calls[0].code() is grpc.StatusCode.INVALID_ARGUMENT
        await node.put(LARGE.pieces())
        await calls[1].write(lie[2])
        await calls[1].done_writing()
        assert await calls[1].code() is grpc.StatusCode.OK
        assert node.uploads.counts == {"stored": 1, "known": 1, "refused": 1}
        assert node.engine.pixels() == {LARGE.digest: LARGE.pixels}
        assert node.uploads.num_bytes == len(LARGE.pixels)

    run(checkpoint, scenario)


def test_an_upload_that_never_ends_is_ended(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PUT_SECONDS", 0.2)

    async def scenario(node: ImageNode) -> None:
        stub: Any = pb_grpc.ImageNodeStub(node.channel)
        for pieces in ([], SMALL.pieces()[:1], LARGE.pieces()[:2]):
            call = stub.Put()
            for piece in pieces:
                await call.write(piece)
            with pytest.raises(grpc.aio.AioRpcError, match=r"did not arrive within 0\.2 s") as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert node.idle()
        assert not node.engine.sent

    run(checkpoint, scenario)


def test_a_cancelled_upload_leaves_nothing(checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        stub: Any = pb_grpc.ImageNodeStub(node.channel)
        for count in (1, 2):
            call = stub.Put()
            for piece in LARGE.pieces()[:count]:
                await call.write(piece)
            await node.until(lambda: node.uploads.num_bytes == len(LARGE.pixels))
            call.cancel()
            await node.until(node.idle)
        assert not node.engine.sent
        await node.put(LARGE.pieces())

    run(checkpoint, scenario)


def test_memory_is_bounded_whatever_arrives(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty images of a tenth of the budget each arrive at once, some twice; many are refused, none is half there."""
    monkeypatch.setattr(uploads, "_PROMPT_SECONDS", 0.1)
    pictures = [Picture(100, 80 + number % 7, value=number) for number in range(25)]
    most = 0

    async def pieces(node: ImageNode, picture: Picture) -> AsyncIterator[pb.ImagePiece]:
        nonlocal most
        for piece in picture.pieces():
            yield piece
            await asyncio.sleep(0.001)
            most = max(most, node.uploads.num_bytes)

    async def put(node: ImageNode, picture: Picture) -> bool:
        stub: Any = pb_grpc.ImageNodeStub(node.channel)
        call = stub.Put(pieces(node, picture))
        if await call.code() is grpc.StatusCode.OK:
            return True
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"of the {BUDGET} of --image-memory" in await call.details()
        return False

    async def scenario(node: ImageNode) -> None:
        stored = await asyncio.gather(*(put(node, picture) for picture in pictures * 2))
        assert 0 < sum(stored) < len(stored)
        assert 0 < most <= BUDGET
        assert sum(map(len, node.engine.pixels().values())) <= BUDGET
        await node.until(node.idle)
        assert await put(node, pictures[0])

    run(checkpoint, scenario)


def test_an_image_that_never_fits_is_refused_for_good(checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        status, details = await node.refused(LARGE.pieces())
        assert status == "INVALID_ARGUMENT", details
        assert "480000 bytes, more than the 100000 of this node's --image-memory" in details
        await node.put(SMALL.pieces())

    run(checkpoint, scenario, budget=100_000)


def test_a_stream_without_end_is_refused_before_its_end(checkpoint: Path) -> None:
    """gRPC may report the write that fails then, in place of the status."""

    async def scenario(node: ImageNode) -> None:
        async def pieces() -> AsyncIterator[pb.ImagePiece]:
            for piece in pieces_of(SMALL.header(digest=b"short")):
                yield piece
            while True:
                yield pb.ImagePiece(data=bytes(PIECE))

        stub: Any = pb_grpc.ImageNodeStub(node.channel)
        assert await stub.Put(pieces()).code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        assert node.uploads.counts["refused"] == 1
        assert node.idle()

    run(checkpoint, scenario)


def test_uploads_without_a_prompt_are_dropped(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_PROMPT_SECONDS", 0.1)

    async def scenario(node: ImageNode) -> None:
        await node.put(SMALL.pieces())
        await node.put(LARGE.pieces())
        await node.until(node.idle)
        assert [message.digest for message in node.engine.sent if isinstance(message, DropPixels)] == [
            SMALL.digest,
            LARGE.digest,
        ]

    run(checkpoint, scenario)


def test_equal_uploads_at_once_are_sent_once(checkpoint: Path) -> None:
    """Both callers are answered when the engine has the pixels, though one of them goes away meanwhile."""

    async def scenario(node: ImageNode) -> None:
        node.engine.writable.clear()
        puts = [asyncio.create_task(node.put(LARGE.pieces())) for _ in range(3)]
        await node.until(lambda: node.uploads.num_bytes == 3 * len(LARGE.pixels))
        puts[0].cancel()
        assert not node.engine.sent
        assert not any(put.done() for put in puts[1:])
        node.engine.writable.set()
        await asyncio.gather(*puts[1:])
        assert node.engine.pixels() == {LARGE.digest: LARGE.pixels}
        await node.until(lambda: node.uploads.num_bytes == len(LARGE.pixels))

    run(checkpoint, scenario)


def test_a_new_epoch_drops_uploads_also_half_sent_ones(checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        await node.put(SMALL.pieces())
        node.engine.writable.clear()
        put = asyncio.create_task(node.put(LARGE.pieces()))
        await node.until(lambda: node.uploads.num_bytes == len(SMALL.pixels) + len(LARGE.pixels))
        await node.until(lambda: node.engine.waiting)
        node.context.begin_epoch(node.context.config)
        assert node.idle()
        node.engine.writable.set()
        with pytest.raises(grpc.aio.AioRpcError, match="begun an epoch"):
            await put
        assert node.idle()
        await node.put(LARGE.pieces())
        assert node.engine.pixels() == {LARGE.digest: LARGE.pixels}

    run(checkpoint, scenario)


@pytest.mark.parametrize("state", [NodeState.LOADING, NodeState.STUCK, NodeState.ASLEEP, NodeState.DRAINING])
def test_a_node_that_takes_no_prompts_takes_no_pixels(state: NodeState, checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        node.context.state = state
        status, _ = await node.refused(SMALL.pieces())
        assert status == ("RESOURCE_EXHAUSTED" if state is NodeState.DRAINING else "UNAVAILABLE")
        assert node.idle()

    run(checkpoint, scenario)


def test_a_state_that_changes_while_pixels_arrive_counts(checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        def pieces() -> Iterator[pb.ImagePiece]:
            yield from LARGE.pieces()
            node.context.state = NodeState.DRAINING

        assert (await node.refused(pieces()))[0] == "RESOURCE_EXHAUSTED"
        assert node.idle()

    run(checkpoint, scenario)


def test_a_prompt_of_text_needs_no_pixels(checkpoint: Path) -> None:
    ids, images = prompt_with()
    assert (ids, images) == ([1], ())

    async def scenario(node: ImageNode) -> None:
        called: list[str] = []
        node.uploads.when_ready(images, lambda: called.append("then"), lambda error: called.append("failed")).release()
        assert called == ["then"]

    run(checkpoint, scenario)
