"""Processes that fetch images by URL: a hostile server meets neither the router's loop nor its memory.

router ── FetcherConfig, then a URL per image ──► fetch_process.py ──► the internet, by the rule of fetching.py
       ◄── FetchResult for each ─────────────────
       ◄── the file, in a scratch file in memory
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import msgspec

from pdserve.errors import NodeError, Overloaded, RequestError
from router.images.decoders import ScratchFile, on_thread
from router.images.fetching import FETCH_SECONDS, SEND_IT, FetchRule
from router.text.fair_slots import FairSlots
from router.text.worker_process import WorkerPool, WorkerProcess

MAX_URLS = 20  # in a request
URLS_AT_ONCE = 4  # in a request
MOST_FETCHERS = 8  # processes, so connections of the router, and files of 20 MiB in its memory

_REQUEST_SECONDS = 30.0  # for all URLs of a request
_CPU_SECONDS = 5  # for an image; 20 MiB over TLS take 0.1
_MAX_MEMORY = 1 << 30  # bytes of address space
_WALL_SECONDS = FETCH_SECONDS + 5.0  # a name server may not answer
_PROCESS = "router.images.fetch_process"


class FetcherConfig(msgspec.Struct, frozen=True):
    """The first message to a process. It answers with an empty one."""

    scratch: int  # descriptor of the scratch file
    rule: FetchRule
    seconds: int = _CPU_SECONDS
    max_memory: int = _MAX_MEMORY


class FetchResult(msgspec.Struct, frozen=True):
    """Bytes in the scratch file, or an error."""

    num_bytes: int = 0
    error: str = ""


class RequestFetches:
    """The fetches of one request: their number at once and their time in all are limited."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(URLS_AT_ONCE)
        self.until = monotonic() + _REQUEST_SECONDS


class Fetcher:
    """A process with its scratch file."""

    def __init__(self, process: WorkerProcess, scratch: ScratchFile) -> None:
        self.process = process
        self.scratch = scratch

    async def kill(self) -> None:
        """Idempotent."""
        await self.process.kill()


class Fetchers:
    """Up to MOST_FETCHERS processes, started on demand and shared fairly by clients. A killed process is replaced."""

    def __init__(self, rule: FetchRule = FetchRule()) -> None:  # noqa: B008 - frozen
        self._rule = rule
        self._slots = FairSlots(MOST_FETCHERS)
        self._workers = WorkerPool(self._start, MOST_FETCHERS)

    @asynccontextmanager
    async def turn(self, request: RequestFetches) -> AsyncIterator[None]:
        """Wait for a turn, and hold it until the file is decoded: so many files at most are in memory.

        Raises Overloaded if the time of the request ends meanwhile.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(request.until - monotonic()):
                    await stack.enter_async_context(request.turns)
                    await stack.enter_async_context(self._slots.slot())
            except TimeoutError as exc:
                raise Overloaded("too many images are being fetched by URL; send the request again later") from exc
            yield

    async def fetch(self, url: str, request: RequestFetches) -> memoryview:
        """Return the file at a URL, in a turn.

        Raises RequestError with what is wrong with the URL, and NodeError without a process.
        """
        seconds = min(_WALL_SECONDS, request.until - monotonic())
        async with self._workers.worker() as fetcher:
            answer = await _exchange(fetcher, url, seconds)
            result = msgspec.json.decode(answer, type=FetchResult)
            file = await on_thread(fetcher.scratch.take, result.num_bytes)
        if result.error:
            raise RequestError(result.error)
        return file

    async def close(self) -> None:
        await self._workers.close()

    async def _start(self) -> Fetcher:
        try:
            scratch = ScratchFile()
            config = FetcherConfig(scratch.fd, self._rule)
            process, _ = await WorkerProcess.start(_PROCESS, msgspec.json.encode(config), pass_fds=(scratch.fd,))
        except (TimeoutError, EOFError, OSError) as exc:
            raise NodeError("the router cannot start a process that fetches images; its log says why") from exc
        return Fetcher(process, scratch)


async def _exchange(fetcher: Fetcher, url: str, seconds: float) -> bytes:
    try:
        return await fetcher.process.exchange(url.encode(), seconds)
    except TimeoutError as exc:
        text = f"its URL takes more than {FETCH_SECONDS:.0f} s, or all URLs more than {_REQUEST_SECONDS:.0f} s"
        raise RequestError(f"{text}; {SEND_IT}") from exc
    except (EOFError, OSError) as exc:
        raise RequestError(f"the answer of its URL's server cannot be read in time; {SEND_IT}") from exc
