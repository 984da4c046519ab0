"""Uploads of pixels: the images that the engine has, or gets, and the prompts that need them.

    router ──Put(pixels)──► verified ──PutPixels──► engine                        by digest, once per image
    router ──Generate──► D ──► prompt ──when_ready──► Submit ──► engine ──► prefilled ──release──► DropPixels

Put and prompt come in any order. Several prompts share an upload. It stays until the last of them is computed, and for
some seconds after a Put whose prompt has not come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from node.image_uploads import NO_CLAIM, OUTCOMES, ImageUploads, PixelClaim
from node.images.incoming import IncomingImage
from node.images.pixel_memory import PixelMemory, ReservedPixels
from pdserve.errors import ImagesMissing, NodeError, PdserveError, RequestError
from pdserve.images import PIXEL_BYTES, ImageInput, Images
from pdserve.ipc.messages import MAX_PIXEL_PART, DropPixels, PutPixels, ToEngine

IMAGES_SERVICE = "pdserve.v1.ImageNode"

_PIXELS_SECONDS = 10.0  # time for pixels to arrive on the node after their prompt
_PROMPT_SECONDS = 30.0  # time for a prompt to arrive after its pixels

Size = tuple[int, int]  # height and width, in pixels


class _Upload:
    """Verified pixels on their way to the engine, and then in it."""

    def __init__(self, size: Size, room: ReservedPixels) -> None:
        self.size = size
        self.room = room
        self.ready = False  # the engine has all pixels before what is sent to it next
        self.users = 0  # prompts that need the pixels
        self.unclaimed = 0  # Puts whose prompt has not come
        self.expiry: asyncio.TimerHandle | None = None  # forgets the unclaimed Puts
        self.sending: asyncio.Task[None]


class _Claim(PixelClaim):
    """The pixels of one prompt."""

    def __init__(
        self,
        uploads: StoredUploads,
        sizes: dict[bytes, Size],
        then: Callable[[], None],
        failed: Callable[[PdserveError], None],
    ) -> None:
        self.sizes = sizes
        self.missing = set(sizes)
        self.held: dict[bytes, _Upload] = {}
        self.then = then
        self.timer: asyncio.TimerHandle | None = None
        self.released = False
        self._uploads = uploads
        self._failed = failed

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._stop_timer()
            self._uploads.end_claim(self)

    def take(self, digest: bytes, upload: _Upload) -> None:
        """Use an upload that is ready."""
        upload.users += 1
        self.held[digest] = upload
        self.missing.discard(digest)

    def go_on(self) -> None:
        """Call ``then`` if all pixels are there."""
        if not self.missing and not self.released:
            self._stop_timer()
            self.then()

    def fail(self, error: PdserveError) -> None:
        if not self.released:
            self.release()
            self._failed(error)

    def start_timer(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(_PIXELS_SECONDS, self._on_timeout)

    def _on_timeout(self) -> None:
        if all(map(self._uploads.has, self.missing)):  # the engine takes them between steps, which may be long
            self.start_timer()
            return
        self.fail(
            ImagesMissing(
                f"the pixels of {len(self.missing)} of {len(self.sizes)} images did not arrive within "
                f"{_PIXELS_SECONDS:g} s; put them, and send the request again"
            )
        )

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class StoredUploads(ImageUploads):
    """The uploads of a node."""

    services = (IMAGES_SERVICE,)
    accepted: ImageInput

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        room: Callable[[], Awaitable[None]],
        accepted: ImageInput,
        budget: int,
    ) -> None:
        """``send`` queues a command for the engine; ``room`` waits until few bytes are queued.

        ``budget``: bytes of pixels.
        """
        self.accepted = accepted
        self.memory = PixelMemory(budget)
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._send = send
        self._room = room
        self._uploads: dict[bytes, _Upload] = {}
        self._waiting: dict[bytes, list[_Claim]] = {}  # claims, by the digest that they wait for

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    @property
    def counts(self) -> Counter[str]:
        return self.outcomes

    # ------------------------------------------------------------ prompts

    def when_ready(
        self, images: Images, then: Callable[[], None], failed: Callable[[PdserveError], None]
    ) -> PixelClaim:
        if not images:
            then()
            return NO_CLAIM
        loop = asyncio.get_running_loop()
        sizes = {span.digest: self.accepted.size(span) for span in images}
        claim = _Claim(self, sizes, then, failed)
        try:
            self.memory.check(sum(height * width * PIXEL_BYTES for height, width in sizes.values()), "the images")
            for digest in sizes:
                self._begin(claim, digest)
        except RequestError as exc:
            claim.timer = loop.call_later(0, claim.fail, exc)
            return claim
        if claim.missing:
            claim.start_timer()
        claim.go_on()
        return claim

    def awaited(self, digest: bytes) -> bool:
        """Return whether a prompt waits for these pixels."""
        return digest in self._waiting

    def has(self, digest: bytes) -> bool:
        """Return whether the node has these pixels; they may still be on their way to the engine."""
        return digest in self._uploads

    def end_claim(self, claim: _Claim) -> None:
        for digest in claim.missing & self._waiting.keys():
            self._waiting[digest].remove(claim)
            if not self._waiting[digest]:
                del self._waiting[digest]
        for digest, upload in claim.held.items():
            upload.users -= 1
            self._drop_unused(digest, upload)
        claim.held.clear()

    def _begin(self, claim: _Claim, digest: bytes) -> None:
        """Have a claim use an upload, or wait for it. Raises RequestError for an image of another size."""
        upload = self._uploads.get(digest)
        if upload is None or not upload.ready:
            self._waiting.setdefault(digest, []).append(claim)
            return
        check_size(digest, claim.sizes[digest], upload.size)
        upload.unclaimed = max(0, upload.unclaimed - 1)
        claim.take(digest, upload)

    # ------------------------------------------------------------ uploads

    def knows(self, digest: bytes) -> bool:
        """Return whether the engine has these pixels; if so, count a Put of them."""
        upload = self._uploads.get(digest)
        if upload is None or not upload.ready:
            return False
        self._count_put(digest, upload)
        return True

    async def store(self, image: IncomingImage) -> None:
        """Send verified pixels to the engine, unless it gets them already. Returns when prompts may use them.

        They are sent also if the caller is cancelled. Raises NodeError if the node begins an epoch meanwhile.
        """
        digest = image.digest
        upload = self._uploads.get(digest)
        if upload is None:
            upload = self._uploads[digest] = _Upload(image.size, image.room.hand_over())
            upload.sending = asyncio.create_task(self._send_pixels(digest, upload, image.pixels), name="pixels")
        self._count_put(digest, upload)
        await asyncio.shield(upload.sending)
        if not upload.ready:
            raise NodeError("the node has begun an epoch, and dropped the pixels; put them again")

    def clear(self) -> None:
        for digest, upload in tuple(self._uploads.items()):
            self._drop(digest, upload)

    def close(self) -> None:
        for upload in self._uploads.values():
            upload.sending.cancel()

    async def _send_pixels(self, digest: bytes, upload: _Upload, pixels: bytearray) -> None:
        for start in range(0, len(pixels), MAX_PIXEL_PART):
            await self._room()
            if self._uploads.get(digest) is not upload:
                return
            part = bytes(memoryview(pixels)[start : start + MAX_PIXEL_PART])
            self._send(PutPixels(digest, part, last=start + len(part) == len(pixels)))
        self._serve_waiting(digest, upload)

    def _serve_waiting(self, digest: bytes, upload: _Upload) -> None:
        """Give pixels to the prompts that wait for them: to all, before any of them goes on and may end."""
        upload.ready = True
        self._set_expiry(digest, upload)
        claims = self._waiting.pop(digest, [])
        upload.unclaimed = max(0, upload.unclaimed - len(claims))
        fitting = []
        for claim in claims:
            try:
                check_size(digest, claim.sizes[digest], upload.size)
            except RequestError as exc:
                claim.fail(exc)
            else:
                claim.take(digest, upload)
                fitting.append(claim)
        for claim in fitting:
            claim.go_on()
        self._drop_unused(digest, upload)

    def _count_put(self, digest: bytes, upload: _Upload) -> None:
        upload.unclaimed += 1
        if upload.ready:
            self._set_expiry(digest, upload)

    def _set_expiry(self, digest: bytes, upload: _Upload) -> None:
        """Keep the pixels for the prompts of unclaimed Puts, for some seconds from now on."""
        if upload.expiry is not None:
            upload.expiry.cancel()
        upload.expiry = asyncio.get_running_loop().call_later(_PROMPT_SECONDS, self._expire, digest, upload)

    def _expire(self, digest: bytes, upload: _Upload) -> None:
        upload.unclaimed = 0
        self._drop_unused(digest, upload)

    def _drop_unused(self, digest: bytes, upload: _Upload) -> None:
        unused = upload.ready and not upload.users and not upload.unclaimed
        if unused and self._uploads.get(digest) is upload:
            self._drop(digest, upload)

    def _drop(self, digest: bytes, upload: _Upload) -> None:
        del self._uploads[digest]
        if upload.expiry is not None:
            upload.expiry.cancel()
        upload.room.free()
        self._send(DropPixels(digest))


def check_size(digest: bytes, size: Size, uploaded: Size) -> None:
    """Raise RequestError unless a prompt's span has the size of the uploaded image."""
    if size != uploaded:
        raise RequestError(
            f"image {digest.hex()} has height {uploaded[0]} and width {uploaded[1]}; the prompt has tokens for "
            f"{size[0]} and {size[1]}",
            "images",
        )
