"""The frontend of a node that encodes images, in this process. Its engine is scripted: it records what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
from checkpoints import node_config

from decode_node.decode_flags import DecodeSettings
from elastic_node.elastic_role import ElasticRole
from node.context import NodeContext
from node.engine_client.client import EngineClient
from node.health import NodeState
from node.images.service import attach_images
from node.images.uploads import StoredUploads
from node.leasing.lease_settings import LeaseSettings
from node.leasing.leasing import Leasing
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from pdserve.config.node_config import NodeConfig
from pdserve.images import ImageInput, ImageMode, ImageSpan, image_digest
from pdserve.ipc.messages import (
    DropPixels,
    EventBatch,
    LeaseCached,
    OutputTokens,
    Prefilled,
    PutPixels,
    RankPlacement,
    Submit,
    ToEngine,
)
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import FinishReason
from pdserve.rpc.protobuf import images_to_pb, pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams
from pdserve.tracing.spans import NO_TRACER
from prefill_node.prefill_flags import PrefillSettings

PLACEHOLDER = 9
CELL = 4  # pixels
FINGERPRINT = bytes(range(32))
INPUT = ImageInput(
    token_id=PLACEHOLDER, patch_size=2, merge_size=2, min_pixels=16, max_pixels=1 << 20, fingerprint=FINGERPRINT
)
BUDGET = 4 << 20
PIECE = 256 << 10


def config_with_images(checkpoint: Path, mode: ImageMode = ImageMode.TOWER) -> NodeConfig:
    return msgspec.structs.replace(node_config(checkpoint), images=mode, image_input=INPUT)


class Picture:
    """An image of rows × columns tokens, filled with ``value``."""

    def __init__(self, rows: int, columns: int, value: int = 0) -> None:
        self.rows = rows
        self.columns = columns
        self.height = rows * CELL
        self.width = columns * CELL
        self.pixels = bytes([value]) * (3 * self.height * self.width)
        self.digest = image_digest(FINGERPRINT, self.height, self.width, self.pixels)

    def header(self, **fields: Any) -> pb.ImageHeader:
        """Return the header, with other ``fields``."""
        mine = {"digest": self.digest, "fingerprint": FINGERPRINT, "height": self.height, "width": self.width}
        return pb.ImageHeader(**{**mine, **fields})

    def pieces(self, size: int = PIECE) -> list[pb.ImagePiece]:
        first = pb.ImagePiece(header=self.header())
        return [first, *(pb.ImagePiece(data=self.pixels[at : at + size]) for at in range(0, len(self.pixels), size))]

    def span(self, start: int) -> ImageSpan:
        return ImageSpan(start, self.rows, self.columns, self.digest)


def prompt_with(*pictures: Picture) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return the ids and images of a prompt: each picture between two tokens of text."""
    ids = [1]
    spans = []
    for picture in pictures:
        spans.append(picture.span(len(ids)))
        ids += [PLACEHOLDER] * (picture.rows * picture.columns) + [2]
    return ids, tuple(spans)


class ScriptedEngine(EngineClient):
    """A client without a process. ``sent`` has the commands; ``writable`` is whether it takes more bytes."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config, "", RankPlacement((config.device,)), None)  # type: ignore[arg-type]  # never started
        self.sent: list[ToEngine] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.waiting = 0  # senders that wait until it is writable

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def room(self) -> None:
        self.waiting += 1
        await self.writable.wait()
        self.waiting -= 1

    @property
    def submitted(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @property
    def pulls(self) -> list[LeaseCached]:
        return [message for message in self.sent if isinstance(message, LeaseCached)]

    def pixels(self) -> dict[bytes, bytes]:
        """Return the complete pixels that the engine has, by digest. Parts of two images never mix."""
        there: dict[bytes, bytes] = {}
        parts: dict[bytes, bytes] = {}
        for message in self.sent:
            match message:
                case PutPixels(digest, data, last):
                    assert digest not in there, "an image was sent twice"
                    parts[digest] = parts.get(digest, b"") + data
                    if last:
                        there[digest] = parts.pop(digest)
                case DropPixels(digest):
                    there.pop(digest, None)
                    parts.pop(digest, None)
                case Submit(images=images):
                    assert {span.digest for span in images} <= there.keys(), "a prompt came before its pixels"
        return there

    def compute(self, submit: Submit, token: int = 5) -> None:
        """Report the end of a prompt, with its only token."""
        outputs = OutputTokens()
        outputs.add(submit.rid, 0, token, logprobs=None, finish=FinishReason.LENGTH)
        self._receive(EventBatch(prefilled=[Prefilled(submit.rid, 0, 0.0)], outputs=outputs))


class ImageNode:
    """An elastic node that is ready, and a client of it."""

    def __init__(self, context: NodeContext, engine: ScriptedEngine, channel: grpc.aio.Channel) -> None:
        self.context = context
        self.engine = engine
        self.channel = channel

    @property
    def uploads(self) -> StoredUploads:
        assert isinstance(self.context.images, StoredUploads)
        return self.context.images

    async def put(self, pieces: Iterable[pb.ImagePiece]) -> None:
        stub: pb_grpc.ImageNodeAsyncStub = pb_grpc.ImageNodeStub(self.channel)
        await stub.Put(iter(pieces))

    async def refused(self, pieces: Iterable[pb.ImagePiece]) -> tuple[str, str]:
        """Return the status and words with which the node refuses an image."""
        try:
            await self.put(pieces)
        except grpc.aio.AioRpcError as exc:
            return exc.code().name, exc.details() or ""
        raise AssertionError("the image was stored")

    async def until(self, condition: Any) -> None:
        for _ in range(6000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("the condition did not hold within 30 s")

    def idle(self) -> bool:
        """Whether no pixels are left anywhere."""
        return not self.uploads.num_bytes and not self.engine.pixels()


class Stream:
    """A stream of a router or decode node to the node, with the messages that came."""

    def __init__(self, node: ImageNode, kind: Any) -> None:
        self.messages: list[Any] = []
        self._call = kind(node.channel).Serve()
        self._reader = asyncio.create_task(self._read())
        self._numbers = iter(range(1, 1000))
        self._node = node

    async def generate(self, ids: Sequence[int], images: Sequence[ImageSpan], **fields: Any) -> int:
        number = next(self._numbers)
        message = pb.Generate(request=number, **self._prompt(ids, images), **fields)
        await self._call.write(pb.ServeRequest(generate=message))
        return number

    async def prefill(self, ids: Sequence[int], images: Sequence[ImageSpan], **fields: Any) -> int:
        number = next(self._numbers)
        epoch = self._node.context.epoch
        message = pb.PrefillRequest(request=number, epoch=epoch, **self._prompt(ids, images), **fields)
        await self._call.write(pb.HandoffRequest(prefill=message))
        return number

    async def write(self, message: Any) -> None:
        await self._call.write(message)

    def outputs(self, number: int) -> list[pb.Output]:
        return [output for batch in self.messages for output in batch.outputs if output.request == number]

    def events(self, number: int) -> list[pb.PrefillEvent]:
        return [event for batch in self.messages for event in batch.events if event.request == number]

    async def cancel(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reader])

    def _prompt(self, ids: Sequence[int], images: Sequence[ImageSpan]) -> dict[str, Any]:
        sampling = sampling_to_pb(SamplingParams(max_tokens=1))
        return {"token_ids": pack_tokens(ids), "images": images_to_pb(tuple(images)), "sampling": sampling}

    async def _read(self) -> None:
        async for message in self._call:
            self.messages.append(message)


@asynccontextmanager
async def image_node(checkpoint: Path, budget: int = BUDGET) -> AsyncIterator[ImageNode]:
    """Serve until the block ends."""
    config = config_with_images(checkpoint)
    engine = ScriptedEngine(config)
    context = NodeContext("both", "n", "epoch", config, engine, None, NO_TRACER, log_requests=False)
    role = ElasticRole(DecodeSettings(), PrefillSettings(), Reading(ReadSettings()), Leasing(LeaseSettings()))
    server = grpc.aio.server()
    attach_images(context, server, budget)
    role.attach(context, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    context.state = NodeState.READY
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ImageNode(context, engine, channel)
    await server.stop(0)
    await role.close()
    context.images.close()
