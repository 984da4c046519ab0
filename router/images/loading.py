"""Loads the images of a request: decoded and resized as the model takes them, in processes of their own (decoders.py).

Requests with equal images at one time share their pixels. All pixels together stay within ``--image-memory``: a request
beyond it gets a 503, since those that hold the memory may themselves wait for more.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import TypeVar

import msgspec

from pdserve.errors import Overloaded, PdserveError, RequestError
from pdserve.images import MAX_IMAGES, ImageInput
from pdserve.tracing.spans import CURRENT_SPAN
from router.images.decoders import DecodedImage, Decoders
from router.images.fetchers import MAX_URLS, Fetchers, RequestFetches
from router.images.source import MAX_BASE64, MAX_FILE_BYTES, ImageSource
from router.metrics import RouterMetrics
from router.text.fair_slots import CLIENT

_MAX_WAITING = 2 * MAX_IMAGES  # images of a client that wait, or are decoded

Result = TypeVar("Result")


class MeasuredImage(msgspec.Struct, frozen=True):
    """The size of an image in tokens. Its pixels are not known."""

    rows: int
    columns: int
    digest: bytes = b""


class LoadedImage:
    """An image as the model takes it. Its memory is freed with the last reference to it."""

    def __init__(self, digest: bytes, height: int, width: int, accepted: ImageInput, pixels: memoryview) -> None:
        self.digest = digest  # image_digest, 32 bytes
        self.height = height  # pixels, resized
        self.width = width
        self.rows, self.columns = accepted.grid(height, width)  # tokens
        self.fingerprint = accepted.fingerprint
        self.pixels = pixels  # uint8 [height * width * 3], RGB
        self._turns: dict[str, asyncio.Lock] = {}

    def turn(self, node_id: str) -> asyncio.Lock:
        """Return the lock of the call that sends the image to a node."""
        return self._turns.setdefault(node_id, asyncio.Lock())


class ImageMemory:
    """The memory of images, in bytes: their pixels, and the files of those that a response store will keep."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0

    def keep(self, image: LoadedImage, others: Sequence[LoadedImage]) -> None:
        """Count an image until it is dropped. ``others`` are those of its request so far.

        Raises Overloaded if it does not fit now, RequestError if the images of its request never do.
        """
        size = image.pixels.nbytes
        if size + sum(other.pixels.nbytes for other in set(others)) > self.budget:
            raise RequestError(
                f"this image and those before it take more than {self.budget} bytes, the router's --image-memory; send "
                "fewer or smaller images"
            )
        if self.num_bytes + size > self.budget:
            raise Overloaded(
                f"an image takes {size} bytes; of the router's {self.budget} (--image-memory), "
                f"{self.budget - self.num_bytes} are free; send the request again later"
            )
        self._count(size, image)

    def hold(self, num_bytes: int, owner: object) -> None:
        """Count encoded images that a request keeps until its response is stored, for as long as ``owner`` lives.

        Raises Overloaded if they do not fit now, RequestError if they never do.
        """
        if num_bytes > self.budget:
            raise RequestError(
                f"the images of the conversation have {num_bytes} bytes, more than the {self.budget} of the router's "
                "--image-memory; send fewer or smaller images, or store: false"
            )
        if self.num_bytes + num_bytes > self.budget:
            raise Overloaded(
                f"the images of the conversation have {num_bytes} bytes; of the router's {self.budget} "
                f"(--image-memory), {self.budget - self.num_bytes} are free; send the request again later"
            )
        if num_bytes:
            self._count(num_bytes, owner)

    def _count(self, size: int, owner: object) -> None:
        self.num_bytes += size
        weakref.finalize(owner, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self.num_bytes -= size


class ImageLoader:
    """One per router."""

    def __init__(
        self,
        memory: int,
        metrics: RouterMetrics,
        decoders: Decoders | None = None,
        fetchers: Fetchers | None = None,
    ) -> None:
        """``memory``: bytes of pixels. ``decoders`` have their usual limits by default. No ``fetchers``, no URLs."""
        self.memory = ImageMemory(memory)
        self._metrics = metrics
        self._decoders = decoders or Decoders()
        self._fetchers = fetchers
        self._images = weakref.WeakValueDictionary[bytes, LoadedImage]()  # by digest
        self._waiting = Counter[str]()  # images that wait or are decoded, by client
        metrics.image_bytes.set_function(lambda: self.memory.num_bytes)

    @property
    def fetches(self) -> bool:
        """Whether images are fetched by URL."""
        return self._fetchers is not None

    async def load(self, sources: Sequence[ImageSource], accepted: ImageInput) -> list[LoadedImage]:
        """Return the images in order; those of equal pixels are one. Raises RequestError, which names the image.

        Raises Overloaded if too many images of the client wait, or if their pixels lack memory.
        """
        loaded: list[LoadedImage] = []  # as they come
        try:
            return await self._each(sources, partial(self._load, accepted=accepted, loaded=loaded))
        finally:
            loaded.clear()  # an error refers to this frame: without its list, the images go at once

    async def measure(self, sources: Sequence[ImageSource], accepted: ImageInput) -> list[MeasuredImage]:
        """Return the sizes of images by their headers, in order. Raises as ``load``."""
        return await self._each(sources, partial(self._measure, accepted=accepted))

    async def _each(
        self, sources: Sequence[ImageSource], read: Callable[[ImageSource, RequestFetches], Awaitable[Result]]
    ) -> list[Result]:
        """Read the images of a request, those of a client within its limit."""
        if len(sources) > MAX_IMAGES:
            raise RequestError(f"the request has {len(sources)} images, the limit is {MAX_IMAGES}; send fewer")
        if not sources:
            return []
        if sum(bool(source.url) for source in sources) > MAX_URLS:
            raise RequestError(f"the request has more than {MAX_URLS} images by URL; send others as 'data:' URLs")
        for source in sources:
            _check_length(source)
        client = CLIENT.get()
        if self._waiting[client] + len(sources) > _MAX_WAITING:
            raise Overloaded(
                f"{self._waiting[client]} images of this client are not decoded yet, and {len(sources)} more make more "
                f"than {_MAX_WAITING}; send the request again later"
            )
        self._waiting[client] += len(sources)
        span = CURRENT_SPAN.get().child("images", {"pdserve.images": len(sources)})
        fetches = RequestFetches()
        tasks = [asyncio.create_task(self._named(source, read, fetches), name="image") for source in sources]
        try:
            return await asyncio.gather(*tasks)
        except PdserveError as exc:
            span.fail(exc)
            raise
        finally:
            span.end()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            tasks.clear()  # as in ``load``
            self._waiting[client] -= len(sources)
            if not self._waiting[client]:
                del self._waiting[client]

    async def close(self) -> None:
        """End the processes."""
        await self._decoders.close()
        if self._fetchers is not None:
            await self._fetchers.close()

    async def _named(
        self,
        source: ImageSource,
        read: Callable[[ImageSource, RequestFetches], Awaitable[Result]],
        fetches: RequestFetches,
    ) -> Result:
        """Read an image; errors name it, and are counted."""
        try:
            return await read(source, fetches)
        except RequestError as exc:
            self._metrics.images.labels("refused").inc()
            raise RequestError(f"{source.name}: {exc}", source.name) from exc
        except PdserveError:
            self._metrics.images.labels("failed").inc()
            raise

    async def _load(
        self, source: ImageSource, fetches: RequestFetches, accepted: ImageInput, loaded: list[LoadedImage]
    ) -> LoadedImage:
        decoded = await self._file(source, fetches, partial(self._decoders.decode, accepted=accepted))
        image = self._keep(decoded, accepted, loaded)
        loaded.append(image)
        self._metrics.images.labels("loaded").inc()
        self._metrics.image_seconds.observe(decoded.seconds)
        return image

    async def _measure(self, source: ImageSource, fetches: RequestFetches, accepted: ImageInput) -> MeasuredImage:
        height, width = await self._file(source, fetches, partial(self._decoders.measure, accepted=accepted))
        return MeasuredImage(*accepted.grid(height, width))

    async def _file(
        self,
        source: ImageSource,
        fetches: RequestFetches,
        read: Callable[[str | bytes | memoryview], Awaitable[Result]],
    ) -> Result:
        """Read the file of an image, once it is here."""
        if not source.url:
            return await read(source.data)
        assert self._fetchers is not None, "URLs are refused before, where none are fetched"
        async with self._fetchers.turn(fetches):
            return await read(await self._fetched(self._fetchers, source.url, fetches))

    async def _fetched(self, fetchers: Fetchers, url: str, fetches: RequestFetches) -> memoryview:
        """Fetch an image, and measure the time."""
        begun = monotonic()
        outcome = "failed"
        try:
            file = await fetchers.fetch(url, fetches)
            outcome = "fetched"
        except RequestError:
            outcome = "refused"
            raise
        finally:
            self._metrics.image_fetch_seconds.of(outcome).observe(monotonic() - begun)
        return file

    def _keep(self, decoded: DecodedImage, accepted: ImageInput, loaded: Sequence[LoadedImage]) -> LoadedImage:
        """Raises Overloaded or RequestError without memory."""
        image = self._images.get(decoded.digest)
        if image is None:
            image = LoadedImage(decoded.digest, decoded.height, decoded.width, accepted, decoded.pixels)
            self.memory.keep(image, loaded)
            self._images[decoded.digest] = image
        return image


def _check_length(source: ImageSource) -> None:
    is_text = isinstance(source.data, str)
    length = len(source.data)
    limit = MAX_BASE64 if is_text else MAX_FILE_BYTES
    if length > limit:
        num_bytes = length * 3 // 4 if is_text else length
        raise RequestError(
            f"{source.name}: the image has {num_bytes} bytes, the limit is {MAX_FILE_BYTES}; send a smaller file",
            source.name,
        )
