"""Decides which step encodes which image, on a node with a vision tower.

A chunk of a prompt computes tokens of an image only if the step finds its embeddings: they are cached, or the step
encodes the image. Otherwise the chunk ends before the image, and goes on there in a later step:

    prompt    text ▒▒▒▒ image ▒▒▒▒ text ▒▒▒▒ image ▒▒▒▒ text
    step 1    ├─────────────────────────┤                       encodes the first; the second exceeds the step's room
    step 2                              ├────────────────────┤  encodes the second

All of an image is encoded, also if only its last tokens lack KV. An image without such tokens is never encoded.

**Room.** The work of an image follows from ``token_cost``. An image that exceeds the room of a step waits for the begin
of a chunk. Then the step encodes it all the same, one in a step; but beside sequences that decode, in pieces:

    paced     decodes, blocks 0 … 4 │ decodes, blocks 5 … 9 │ … │ decodes, the last blocks, a chunk of the prompt

A piece has the blocks of the tower that fit into the room of its step, and at least one: one piece in a step may exceed
the room. The last piece comes with a chunk of the prompt if both fit.

**At most one image is partial**, so that hidden states take bounded memory. The room of every prompt that waits for an
image goes to the partial one, whichever it is. So it is complete after at most ``depth`` turns of such prompts, and
none of them waits for a prompt that gets no turn. A partial image for which no running prompt waits is dropped: its
prompt has ended, or was preempted or paused.

**Whole images.** In some models, tokens of an image see later ones. Then a step computes all of its tokens that have no
KV yet, although they may exceed its room: a chunk ends before an image, or behind it. KV of some of its tokens may be
cached: a step computed them with the rest, and the block hashes have the digest of the whole image.

**Memory.** Embeddings in use stay (image_cache.py), and so do those that the next token of a running prompt needs, and
those of the partial image. So an image may have to wait for memory. A partial image has its memory since its first
piece.

**Every prompt ends.** The *due* prompt is the first admitted one whose next token needs an image that lacks embeddings.
While there is one, it alone may exceed the room or begin a partial image. No later prompt begins an image that would
take its memory, not even a cached one. What the next tokens of later prompts need is not kept from it: they encode that
again. So others hold memory against it only for steps in flight, which end, for a partial image, which its own turns
complete, and for prompts admitted before it. These find the embeddings of their next token, so they go on, and end or
become due. The first admitted prompt of all is due or goes on, and an image alone fits, or ``fault`` has refused its
prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

import msgspec

from engine.images.image_cache import ImageCache
from engine.images.image_steps import ImageOrders, ImageSteps
from engine.images.pixel_store import PixelStore
from engine.sequence import Sequence
from pdserve.images import EncodedImage, EncodingCost, ImageInput, Images, ImageSpan, images_among
from pdserve.ipc.messages import DropPixels, PutPixels, Totals
from pdserve.records import StepPlan


class EncodingCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and work of images on a node, from NodeConfig."""

    accepted: ImageInput
    cache: int  # bytes of embeddings
    token_bytes: int  # embeddings of a token
    token_cost: EncodingCost
    least: int  # tokens of the chunk that follows an image which exceeds the room of a step
    depth: int  # blocks of the tower
    whole: bool = False  # a step computes all tokens of an image that have no KV yet

    def size(self, span: ImageSpan) -> int:
        """Return the bytes of its embeddings."""
        return self.accepted.num_embeddings(span) * self.token_bytes

    def work(self, num_embeddings: int, first: int, last: int) -> int:
        """Return the work of blocks ``first`` … ``last`` - 1 on an image, in tokens of a prompt."""
        return self.token_cost.work(num_embeddings, first, last, self.depth)

    def last_within(self, work: int, span: ImageSpan, first: int) -> int:
        """Return how many blocks an image may have passed after ``work`` more than the ``first`` ones take."""
        return self.token_cost.last_within(work, self.accepted.num_embeddings(span), first, self.depth)


@dataclass
class _Partial:
    """An image that is being encoded in pieces."""

    image: ImageSpan
    num_done: int  # blocks


class ImageEncoding(ImageSteps):
    def __init__(self, costs: EncodingCosts, totals: Totals) -> None:
        self._costs = costs
        self._totals = totals
        self._pixels = PixelStore()
        self._cache = ImageCache(costs.cache)
        self._step = 0
        self._kept: frozenset[bytes] = frozenset()  # images that the next tokens of running prompts need
        self._begun: frozenset[bytes] = frozenset()  # images that running prompts are in the middle of
        self._kept_before_due: frozenset[bytes] = frozenset()  # images of the prompts admitted before the due one
        self._before_due: frozenset[Sequence] = frozenset()
        self._due: Sequence | None = None  # None: none is due, or the step encodes its image
        self._due_image: dict[bytes, int] = {}  # with its bytes
        self._exceeded = False  # an image in the step, or a piece, exceeds its room
        self._partial: _Partial | None = None
        self._unused: bytes | None = None  # image that was encoded in pieces last, until a chunk uses it
        self._encoded: list[EncodedImage] = []

    # ------------------------------------------------------------ commands

    def take(self, pixels: PutPixels | DropPixels) -> None:
        if isinstance(pixels, PutPixels):
            self._pixels.put(pixels)
        else:
            self._pixels.drop(pixels.digest)

    def forget(self) -> None:
        self._cache.forget()
        self._partial = None

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
        work = sum(self._work_of(image) for image in images if self._lacks_embeddings(image))
        return super().missing_work(sequence, computed) + work

    # ------------------------------------------------------------ a step

    def begin(self, step: int, prompts: Collection[Sequence]) -> None:
        self._step = step
        self._exceeded = False
        self._due = None
        self._due_image = {}
        kept = self._keep_partial(prompts)
        begun = list[bytes]()
        for number, sequence in enumerate(prompts):
            for image in images_among(sequence.request.images, sequence.num_launched, sequence.num_launched + 1):
                if not self._lacks_embeddings(image):
                    kept.append(image.digest)
                    begun += [image.digest] if image.start < sequence.num_launched else []
                elif self._due is None and self._can_encode(image):
                    self._due = sequence
                    self._due_image = {image.digest: self._costs.size(image)}
                    self._before_due = frozenset(islice(prompts, number))
                    self._kept_before_due = frozenset(kept)
        self._kept = frozenset(kept)
        self._begun = frozenset(begun)

    def limit(self, sequence: Sequence, num_tokens: int, room: int, held: int, paced: bool = False) -> int:
        num_tokens = self._limit(sequence, num_tokens, room, paced)
        image = self._cut_image(sequence, num_tokens) if self._costs.whole and num_tokens else None
        if image is None:
            return num_tokens
        begin = sequence.num_launched
        if begin < image.start:
            return image.start - begin
        return image.end - begin if image.end - begin <= held else 0

    def _limit(self, sequence: Sequence, num_tokens: int, room: int, paced: bool) -> int:
        """Return ``limit`` where chunks may end inside images."""
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
            is_cached = not self._lacks_embeddings(image)
            if not (is_cached and digest in kept and digest in self._begun) and not self._cache.fits(needed, kept):
                return before
            if is_cached or digest in encoded:
                continue
            if not self._can_encode(image):
                return before
            encoded.add(digest)
            work += self._work_of(image)
            if before + work < room:
                num_tokens = min(num_tokens, room - work)
            elif before or paced or self._exceeded or not (is_due or self._due is None):
                return before
            else:
                return min(num_tokens, self._costs.least, image.end - begin)
        return num_tokens

    def cuts(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._costs.whole and self._cut_image(sequence, num_tokens) is not None

    @staticmethod
    def _cut_image(sequence: Sequence, num_tokens: int) -> ImageSpan | None:
        """Return the image that a chunk of its next ``num_tokens`` tokens ends inside; None: it ends between images."""
        end = sequence.num_launched + num_tokens
        cut = images_among(sequence.request.images, end - 1, end + 1)
        return next((image for image in cut if image.start < end < image.end), None)

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
            is_new = self._cache.use(image.digest, self._costs.size(image), self._step, kept)
            if is_new or self._is_partial(image):
                work += self._encode(self._partial_of(image), self._costs.depth)
            elif image.start >= begin and image.digest != self._unused:
                self._totals.image_cache_hits += 1
            if image.digest == self._unused:
                self._unused = None
        self._exceeded |= work > 0 and num_tokens + work > room
        return work

    def add_piece(self, sequence: Sequence, room: int) -> int:
        kept = self._kept_before_due if sequence is self._due else self._kept
        partial = self._partial or self._next_partial(sequence, kept)
        if partial is None:
            return 0
        image = partial.image
        depth = self._costs.depth
        last = self._costs.last_within(max(0, room), image, partial.num_done)
        if last == partial.num_done:
            if self._exceeded:
                return 0
            self._exceeded = True
            last += 1
        self._cache.use(image.digest, self._costs.size(image), self._step, kept)
        self._unused = image.digest if last == depth else self._unused
        return self._encode(partial, last)

    def take_orders(self) -> ImageOrders:
        orders = ImageOrders(self._cache.take_dropped(), tuple(self._encoded))
        self._encoded = []
        return orders

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        return self._cache.take_changes()

    def work(self, plan: StepPlan) -> int:
        cell = self._costs.accepted.cell**2
        return sum(
            self._costs.work(image.height * image.width // cell, image.first, image.last) for image in plan.images
        )

    def applied(self, step: int) -> None:
        self._cache.applied(step)

    def _keep_partial(self, prompts: Collection[Sequence]) -> list[bytes]:
        """Return the digest of the partial image if a prompt waits for it, else drop it."""
        if self._partial is None:
            return []
        digest = self._partial.image.digest
        for sequence in prompts:
            begin = sequence.num_launched
            if any(image.digest == digest for image in images_among(sequence.request.images, begin, begin + 1)):
                return [digest]
        self._cache.drop(digest)
        self._partial = None
        return []

    def _next_partial(self, sequence: Sequence, kept: Collection[bytes]) -> _Partial | None:
        """Return the image of the next token of a prompt if its pieces may begin, None otherwise."""
        begin = sequence.num_launched
        if self._exceeded or not (sequence is self._due or self._due is None):
            return None
        for image in images_among(sequence.request.images, begin, begin + 1):
            can_begin = self._lacks_embeddings(image) and self._can_encode(image)
            if can_begin and self._cache.fits({image.digest: self._costs.size(image)}, kept):
                return _Partial(image, 0)
        return None

    def _partial_of(self, image: ImageSpan) -> _Partial:
        return self._partial if self._partial is not None and self._is_partial(image) else _Partial(image, 0)

    def _encode(self, partial: _Partial, last: int) -> int:
        """Order the next blocks of an image, and return their work."""
        costs = self._costs
        image = partial.image
        first = partial.num_done
        height, width = costs.accepted.size(image)
        pixels = b"" if first else self._pixels.get(image.digest)
        piece = EncodedImage(image.digest, height, width, pixels, first, last, costs.depth)
        self._encoded.append(piece)
        partial.num_done = last
        if not piece.ends:
            self._partial = partial
        else:
            self._totals.images_encoded += 1
            self._cache.completed(image.digest)
            if self._is_partial(image):
                self._partial = None
        return costs.work(costs.accepted.num_embeddings(image), first, last)

    def _work_of(self, image: ImageSpan) -> int:
        """Return the work of encoding what an image lacks."""
        costs = self._costs
        return costs.work(costs.accepted.num_embeddings(image), self._partial_of(image).num_done, costs.depth)

    def _lacks_embeddings(self, image: ImageSpan) -> bool:
        return image.digest not in self._cache or self._is_partial(image)

    def _is_partial(self, image: ImageSpan) -> bool:
        return self._partial is not None and image.digest == self._partial.image.digest

    def _can_encode(self, image: ImageSpan) -> bool:
        """Whether its pixels are here, or no longer needed."""
        return image.digest in self._pixels or self._is_partial(image)
