"""Processes that decode images: a hostile file may take long, fill the memory or end its process, but not the router.

    router ── DecoderConfig, then DecodeRequest per image ──► decode_process.py
           ◄── DecodeResult for each ────────────────────────
           the file ──► a scratch file in memory ──► the pixels, in its place

The scratch file has no name and belongs to one process; it goes with the last process that has it open.
"""

from __future__ import annotations

import asyncio
import os
import signal
import weakref
from collections.abc import Callable
from mmap import mmap
from time import monotonic
from typing import NamedTuple, TypeVar

import msgspec

from pdserve.errors import NodeError, RequestError
from pdserve.host.cpus import usable_cpus
from pdserve.images import PIXEL_BYTES, ImageInput
from router.text.worker_process import WorkerPool, WorkerProcess

DECODE_SECONDS = 10  # CPU time for an image; those of 64 megapixels take 1 to 5
MAX_MEMORY = 2 << 30  # bytes of address space
MOST_DECODERS = 4  # processes, at most one per CPU but two

_WALL_SECONDS = 60.0  # for a process that gets no CPU
_PROCESS = "router.images.decode_process"

Result = TypeVar("Result")


class DecoderConfig(msgspec.Struct, frozen=True):
    """The first message to a process. It answers with an empty one."""

    scratch: int  # descriptor of the scratch file
    seconds: int  # CPU time for an image
    max_memory: int


class DecodeRequest(msgspec.Struct, frozen=True):
    """The file in the scratch file."""

    is_base64: bool
    accepted: ImageInput
    measures: bool = False  # only the size of the image is needed


class DecodeResult(msgspec.Struct, frozen=True):
    """The image in the scratch file, or an error."""

    height: int = 0  # pixels
    width: int = 0
    digest: bytes = b""
    error: str = ""


class DecodedImage(NamedTuple):
    height: int  # pixels
    width: int
    digest: bytes
    pixels: memoryview  # uint8 [height * width * 3], RGB
    seconds: float  # from the free process to the pixels


class ScratchFile:
    """A file in memory that this process shares with a decoder. It is closed with the last reference to it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pdserve image", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.fd)

    def write(self, data: str | bytes | memoryview) -> None:
        """Replace the content. Raises UnicodeEncodeError for text that cannot be base64."""
        content = memoryview(data.encode("ascii") if isinstance(data, str) else data)
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        while content:
            content = content[os.write(self.fd, content) :]

    def take(self, num_bytes: int) -> memoryview:
        """Return the content and free its memory here. Raises EOFError if it is shorter."""
        if not num_bytes:
            return memoryview(b"")
        content = memoryview(mmap(-1, num_bytes))  # filling a bytearray with zeros would block other threads
        offset = 0
        while offset < num_bytes:
            length = os.preadv(self.fd, [content[offset:]], offset)
            if not length:
                raise EOFError
            offset += length
        os.ftruncate(self.fd, 0)
        return content


class Decoder:
    """A process with its scratch file."""

    def __init__(self, process: WorkerProcess, scratch: ScratchFile) -> None:
        self.process = process
        self.scratch = scratch

    async def kill(self) -> None:
        """Idempotent."""
        await self.process.kill()


class Decoders:
    """Up to MOST_DECODERS processes, started on demand and shared fairly by clients. A killed process is replaced."""

    def __init__(self, seconds: int = DECODE_SECONDS, max_memory: int = MAX_MEMORY) -> None:
        self._seconds = seconds
        self._max_memory = max_memory
        self._workers = WorkerPool(self._start, max(2, min(MOST_DECODERS, usable_cpus())))

    async def decode(self, data: str | bytes | memoryview, accepted: ImageInput) -> DecodedImage:
        """Return an image as the model takes it.

        Raises RequestError with what is wrong with the image, and NodeError without a process.
        """
        return await self._run(data, DecodeRequest(isinstance(data, str), accepted))

    async def measure(self, data: str | bytes | memoryview, accepted: ImageInput) -> tuple[int, int]:
        """Return height and width of an image as the model takes it, by its header. Raises as ``decode``."""
        image = await self._run(data, DecodeRequest(isinstance(data, str), accepted, measures=True))
        return image.height, image.width

    async def _run(self, data: str | bytes | memoryview, request: DecodeRequest) -> DecodedImage:
        decoder: Decoder | None = None
        try:
            async with self._workers.worker() as decoder:
                begun = monotonic()
                await on_thread(decoder.scratch.write, data)
                answer = await decoder.process.exchange(msgspec.json.encode(request), _WALL_SECONDS)
                result = msgspec.json.decode(answer, type=DecodeResult)
                num_bytes = 0 if request.measures else result.height * result.width * PIXEL_BYTES
                pixels = await on_thread(decoder.scratch.take, num_bytes)
                seconds = monotonic() - begun
        except UnicodeEncodeError as exc:
            raise RequestError("the data is no base64: it has other characters; send the file's bytes") from exc
        except (EOFError, OSError) as exc:  # TimeoutError is an OSError
            if isinstance(exc, TimeoutError) or (decoder is not None and decoder.process.status == -signal.SIGXCPU):
                raise RequestError(
                    f"the image takes more than {self._seconds} s of CPU time to decode; send it in a smaller size"
                ) from exc
            raise RequestError("the image ended the process that decoded it; save it in another format") from exc
        if result.error:
            raise RequestError(result.error)
        return DecodedImage(result.height, result.width, result.digest, pixels, seconds)

    async def close(self) -> None:
        await self._workers.close()

    async def _start(self) -> Decoder:
        try:
            scratch = ScratchFile()
            config = DecoderConfig(scratch.fd, self._seconds, self._max_memory)
            process, _ = await WorkerProcess.start(_PROCESS, msgspec.json.encode(config), pass_fds=(scratch.fd,))
        except (TimeoutError, EOFError, OSError) as exc:
            raise NodeError("the router cannot start a process for images; its log says why") from exc
        return Decoder(process, scratch)


async def on_thread(work: Callable[..., Result], *args: object) -> Result:
    """Run ``work`` on a thread, also to its end if the caller is cancelled: two never use one scratch file."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return running.result()
