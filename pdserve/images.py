"""Images of a prompt, without their pixels: where they lie, and what the block hashes derive from that.

    token ids  … 9  [image] [image] [image] [image] [image] [image]  7 …     one placeholder id per token of an image
    span           start=1  rows=2  columns=3  digest=…                       its merged grid and pixels

Some models end each row of an image with a token of text, such as Mistral's [IMG_BREAK]. It belongs to the span, and
counts as a column; its embedding is the text model's:

    token ids  … 9  [image] [image] [break] [image] [image] [end] 7 …         the same rows and columns

Others have a token of text before and behind each image, such as Gemma's. These do not belong to the span.

Spans travel beside the token ids from the router to the runner. No part searches a prompt for placeholder ids: text may
hold them, too. Their positions are in image_positions.py.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import StrEnum
from hashlib import sha256
from math import ceil, isqrt

import msgspec

MAX_IMAGES = 100  # in a prompt
MAX_GRID = 4096  # rows or columns of an image, in tokens
DIGEST_BYTES = 32
PIXEL_BYTES = 3  # red, green, blue

_DIGEST_DOMAIN = b"pdserve image 1\0"


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of an image in a prompt, row by row: one per cell of its merged grid, and those that end rows."""

    start: int  # index of its first token in the prompt
    rows: int  # height in pixels / ImageInput.cell
    columns: int  # width in pixels / ImageInput.cell; plus 1 with ImageInput.row_end
    digest: bytes  # image_digest, 32 bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Index of the token after it."""
        return self.start + self.rows * self.columns


#: By start; no token belongs to two of them.
Images = tuple[ImageSpan, ...]


class ImageMode(StrEnum):
    """A node's treatment of images in prompts."""

    NONE = "none"  # refuses them
    POSITIONS = "positions"  # continues a prompt that a peer has computed
    TOWER = "tower"  # encodes them, too


class ImageInput(msgspec.Struct, frozen=True):
    """The images that a model takes. Routers resize images by it; nodes compare what they get with it."""

    token_id: int  # placeholder of each token of an image
    patch_size: int  # pixels
    merge_size: int  # patches on a side of a token
    min_pixels: int  # height × width, after resizing
    max_pixels: int
    fingerprint: bytes  # SHA-256 of the image processor's configuration
    max_side: int = 0  # pixels, before sides are rounded up to tokens; 0: the number of pixels is bounded, not a side
    row_end: int = 0  # token of text that ends each row but the last; 0: rows have none
    image_end: int = 0  # token of text that ends the last row, if rows have such tokens
    before: int = 0  # token of text before each image, outside its span; 0: none
    behind: int = 0  # token of text behind each image, outside its span; 0: none
    fills: bool = False  # images are enlarged or shrunk to max_pixels, and their sides rounded down to tokens

    @property
    def cell(self) -> int:
        """Pixels on a side of a token."""
        return self.patch_size * self.merge_size

    @property
    def largest_side(self) -> int:
        """Most pixels on a side of a resized image."""
        return ceil(self.max_side / self.cell) * self.cell if self.max_side else MAX_GRID * self.cell

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the span of an image of so many pixels, which are multiples of ``cell``."""
        return height // self.cell, width // self.cell + self._row_ends

    def size(self, span: ImageSpan) -> tuple[int, int]:
        """Return height and width in pixels of the image that ``span`` stands for."""
        return span.rows * self.cell, (span.columns - self._row_ends) * self.cell

    def embeddings_before(self, span: ImageSpan, token: int) -> int:
        """Return how many of the first ``token`` tokens of an image have embeddings of the tower."""
        return token - token // span.columns * self._row_ends

    def num_embeddings(self, span: ImageSpan) -> int:
        """Return the tokens of an image whose embeddings are the tower's."""
        return self.embeddings_before(span, span.num_tokens)

    @property
    def _row_ends(self) -> int:
        """Tokens of text in a row."""
        return 1 if self.row_end else 0


def largest_image(accepted: ImageInput, max_model_len: int) -> int:
    """Return the embeddings of the largest image that a prompt can have."""
    return max(1, min(accepted.max_pixels // accepted.cell**2, max_model_len))


def most_tokens(accepted: ImageInput, max_model_len: int) -> int:
    """Return the tokens of the largest image that a prompt can have; it is a square if rows end with tokens."""
    embeddings = largest_image(accepted, max_model_len)
    return min(embeddings + isqrt(embeddings), max_model_len) if accepted.row_end else embeddings


def block_extra(images: Images, start: int, end: int) -> bytes:
    """Return what the images add to the hash of the block of the tokens start … end - 1; empty without an image there.

    36 bytes per image: its digest, and the place of its first token relative to the block (int32, little-endian).
    """
    there = block_images(images, start, end)
    return b"".join(digest + offset.to_bytes(4, "little", signed=True) for digest, offset in there)


def block_images(images: Images, start: int, end: int) -> tuple[tuple[bytes, int], ...]:
    """Return digest and relative place of each image with tokens among start … end - 1."""
    return tuple((span.digest, span.start - start) for span in images_among(images, start, end))


def images_among(images: Images, start: int, end: int) -> Images:
    """Return the images with tokens among start … end - 1."""
    if not images:
        return ()
    first = bisect_right(images, start, key=_end)
    last = first
    while last < len(images) and images[last].start < end:
        last += 1
    return images[first:last]


def _end(span: ImageSpan) -> int:
    return span.end


def tokens_to_end(images: Images, computed: int) -> int:
    """Return the tokens from the one behind the first ``computed`` to the end of its image; 1 if it is text."""
    for image in images_among(images, computed, computed + 1):
        return image.end - computed
    return 1


def first_needed(images: Images, computed: int) -> ImageSpan | None:
    """Return the first image of which not all tokens are among the first ``computed`` of the prompt."""
    index = bisect_right(images, computed, key=_end)
    return images[index] if index < len(images) else None


def choices_compute_images(images: Images, n: int, num_tokens: int, block_size: int) -> bool:
    """Return whether choices but the first may compute tokens of an image, for which their node needs its pixels.

    Choices share the full blocks of a prompt of ``num_tokens``, and compute the tokens behind these again: of an image,
    only if they get no copy of that block (engine/kv_cache/block_copies.py).
    """
    shared = num_tokens // block_size * block_size
    return n > 1 and bool(images) and images[-1].end > shared


class EncodingCost(msgspec.Struct, frozen=True):
    """The work of encoding a token of an image, in tokens of a prompt that attend to none: ``base + slope × tokens``.

    It grows with the tokens of the image, which attend to each other.
    """

    base: float = 0.0
    slope: float = 0.0

    def at(self, num_tokens: int) -> float:
        return self.base + self.slope * num_tokens

    def work(self, num_tokens: int, first: int = 0, last: int = 1, depth: int = 1) -> int:
        """Return the work of an image in blocks ``first`` … ``last`` - 1 of ``depth``. Pieces sum up to the whole."""
        whole = ceil(num_tokens * self.at(num_tokens))
        return whole * last // depth - whole * first // depth

    def last_within(self, work: int, num_tokens: int, first: int, depth: int) -> int:
        """Return how many blocks an image may have passed after ``work`` more than the ``first`` ones take."""
        whole = ceil(num_tokens * self.at(num_tokens))
        return min(depth, ((work + whole * first // depth + 1) * depth - 1) // whole) if whole else depth


class EncodedImage(msgspec.Struct, frozen=True):
    """An image that the first stage encodes before a step, as a whole or in pieces, which follow each other.

    A piece runs blocks ``first`` … ``last`` - 1 of a tower of ``depth`` blocks. The last one stores the embeddings.
    These, or the hidden states between two pieces, stay until ``StepPlan.dropped_images``. Images may be encoded as
    wholes between the pieces of another one, but pieces of two images never alternate.
    """

    digest: bytes  # ImageSpan.digest
    height: int  # pixels
    width: int
    pixels: bytes  # uint8 [height, width, 3], RGB; empty in a piece that is not the first, and on later stages
    first: int = 0
    last: int = 1
    depth: int = 1  # 1: the tower is not divided

    @property
    def begins(self) -> bool:
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether the image has embeddings after it."""
        return self.last == self.depth


def image_digest(fingerprint: bytes, height: int, width: int, pixels: bytes | memoryview) -> bytes:
    """Return the SHA-256 that identifies a resized image. ``pixels``: RGB, uint8 [height, width, 3].

    ``fingerprint`` is ImageInput.fingerprint: unequal processors share nothing.
    """
    digest = sha256(_DIGEST_DOMAIN + fingerprint + height.to_bytes(4, "little") + width.to_bytes(4, "little"))
    digest.update(pixels)
    return digest.digest()
