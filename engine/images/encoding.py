"""Decides which step encodes which image, on a node with a vision tower.

A chunk of a prompt computes tokens of an image only if the step finds its embeddings: they are cached, or the step
encodes the image. Otherwise the chunk ends before the image, and goes on there in a later step:

    prompt    text ▒▒▒▒ image ▒▒▒▒ text ▒▒▒▒ image ▒▒▒▒ text
    step 1    ├─────────────────────────┤                       encodes the first; the second exceeds the step's room
    step 2                              ├────────────────────┤  encodes the second

An image is encoded as a whole, also if only its last tokens lack KV. An image without such tokens is never encoded.

**Room.** To encode a token takes as long as ``token_cost`` tokens of a prompt. An image that exceeds the room of a
step, by which streams keep their gaps, is encoded all the same at the begin of a chunk: one in a step.

**Memory.** Embeddings in use stay (image_cache.py), and so do those of an image that a running prompt is in the middle
of. So an image may have to wait for memory.

**Every prompt ends.** The *due* prompt is the first admitted one whose next token needs an image that lacks
embeddings. While there is one, it alone may exceed the room. No later prompt begins an image that would take its
memory, not even a cached one. What later prompts are in the middle of is not kept from it: they encode that again. So
others hold memory against it only for steps in flight, which end, and for prompts admitted before it. These find the
embeddings of their next token, so they go on, and end or become due. The first admitted prompt of all is due or goes
on, and an image alone fits, or ``fault`` has refused its prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

import msgspec

from engine.images.image_cache import ImageCache
from engine.images.image_steps import ImageOrders, ImageSteps
from engine.images.pixel_store import PixelStore
from engine.sequence import Sequence
from pdserve.images import ImageInput, Images, ImageSpan, encoding_work, images_among
from pdserve.ipc.messages import DropPixels, PutPixels, Totals
from pdserve.records import EncodedImage, StepPlan


class EncodingCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What images take; see NodeConfig."""

    accepted: ImageInput
    cache: int  # bytes of embeddings
    token_bytes: int  # embeddings of a token
    token_cost: float  # work of encoding a token, in tokens of a prompt
    least: int  # tokens of the chunk that follows an image which exceeds the room of a step

    def size(self, span: ImageSpan) -> int:
        """Return the bytes of its embeddings."""
        return self.accepted.num_embeddings(span) * self.token_bytes

    def work(self, height: int, width: int) -> int:
        """Return the work of encoding an image of these pixels, in tokens of a prompt."""
        return encoding_work(height * width, self.accepted, self.token_cost)


class ImageEncoding(ImageSteps):
    def __init__(self, costs: EncodingCosts, totals: Totals) -> None:
        self._costs = costs
        self._totals = totals
        self._pixels = PixelStore()
        self._cache = ImageCache(costs.cache)
        self._step = 0
        self._kept: frozenset[bytes] = frozenset()  # images that running prompts are in the middle of
        self._kept_before_due: frozenset[bytes] = frozenset()  # images of the prompts admitted before the due one
        self._before_due: frozenset[Sequence] = frozenset()
        self._due: Sequence | None = None  # None: none is due, or the step encodes its image
        self._due_image: dict[bytes, int] = {}  # with its bytes
        self._exceeded = False  # an image in the step exceeds its room
        self._encoded: list[EncodedImage] = []

    # ------------------------------------------------------------ commands

    def take(self, pixels: PutPixels | DropPixels) -> None:
        if isinstance(pixels, PutPixels):
            self._pixels.put(pixels)
        else:
            self._pixels.drop(pixels.digest)

    def forget(self) -> None:
        self._cache.forget()

    # ------------------------------------------------------------ requests

    def fault(self, images: Images) -> str:
        largest = max((self._costs.size(span) for span in images), default=0)
        if largest <= self._costs.cache:
            return ""
        return (
            f"an image takes {largest} bytes of embeddings, more than the {self._costs.cache} of this node's "
            "--image-cache; send a smaller image"
        )

    def missing(self, sequence: Sequence) -> str:
        for image in self._to_compute(sequence):
            if image.digest not in self._cache and image.digest not in self._pixels:
                return (
                    f"the pixels of the image at token {image.start} are no longer on this node; put them, and send "
                    "the request again"
                )
        return ""

    def missing_work(self, sequence: Sequence, computed: int) -> int:
        images = images_among(sequence.request.images, computed, sequence.end_here)
        work = sum(self._work_of(image) for image in images if image.digest not in self._cache)
        return super().missing_work(sequence, computed) + work

    # ------------------------------------------------------------ a step

    def begin(self, step: int, prompts: Collection[Sequence]) -> None:
        self._step = step
        self._exceeded = False
        self._due = None
        self._due_image = {}
        kept = list[bytes]()
        for number, sequence in enumerate(prompts):
            for image in images_among(sequence.request.images, sequence.num_launched, sequence.num_launched + 1):
                if image.digest in self._cache:
                    kept += [image.digest] if image.start < sequence.num_launched else []
                elif image.digest in self._pixels and self._due is None:
                    self._due = sequence
                    self._due_image = {image.digest: self._costs.size(image)}
                    self._before_due = frozenset(islice(prompts, number))
                    self._kept_before_due = frozenset(kept)
        self._kept = frozenset(kept)

    def limit(self, sequence: Sequence, num_tokens: int, room: int) -> int:
        begin = sequence.num_launched
        is_due = sequence is self._due
        kept = self._kept_before_due if is_due else self._kept
        needed = {} if is_due or sequence in self._before_due else dict(self._due_image)
        encoded = set[bytes]()
        work = 0
        for image in images_among(sequence.request.images, begin, begin + num_tokens):
            before = max(0, image.start - begin)  # tokens of the chunk
            if before >= num_tokens:
                break
            digest = image.digest
            needed[digest] = self._costs.size(image)
            is_cached = digest in self._cache
            if not (is_cached and digest in kept) and not self._cache.fits(needed, kept):
                return before
            if is_cached or digest in encoded:
                continue
            if digest not in self._pixels:
                return before
            encoded.add(digest)
            work += self._work_of(image)
            if before + work < room:
                num_tokens = min(num_tokens, room - work)
            elif before or self._exceeded or not (is_due or self._due is None):
                return before
            else:
                return min(num_tokens, self._costs.least, image.end - begin)
        return num_tokens

    def add(self, sequence: Sequence, num_tokens: int, room: int) -> int:
        begin = sequence.num_launched
        images = images_among(sequence.request.images, begin, begin + num_tokens)
        kept = self._kept
        if sequence is self._due:
            kept = self._kept_before_due
            self._due = None
            self._due_image = {}
        work = 0
        for image in sorted(images, key=self._lacks_embeddings):  # cached ones first, or others might replace them
            if self._cache.use(image.digest, self._costs.size(image), self._step, kept):
                self._encode(image)
                work += self._work_of(image)
            elif image.start >= begin:
                self._totals.image_cache_hits += 1
        self._exceeded |= work > 0 and num_tokens + work > room
        return work

    def take_orders(self) -> ImageOrders:
        orders = ImageOrders(self._cache.take_dropped(), tuple(self._encoded))
        self._encoded = []
        return orders

    def work(self, plan: StepPlan) -> int:
        return sum(self._costs.work(image.height, image.width) for image in plan.images)

    def applied(self, step: int) -> None:
        self._cache.applied(step)

    def _work_of(self, image: ImageSpan) -> int:
        return self._costs.work(*self._costs.accepted.size(image))

    def _lacks_embeddings(self, image: ImageSpan) -> bool:
        return image.digest not in self._cache

    def _encode(self, image: ImageSpan) -> None:
        height, width = self._costs.accepted.size(image)
        self._encoded.append(EncodedImage(image.digest, height, width, self._pixels.get(image.digest)))
        self._totals.images_encoded += 1
