"""Expands the placeholders of images in a tokenized prompt, once, and returns where the images lie.

    template   … <|vision_start|> <|image_pad|> <|vision_end|> What is this?
    token ids  … 3 [image] 4 8 9         one id per image
    expanded   … 3 [image] [image] [image] [image] [image] [image] 4 8 9        rows × columns ids, and an ImageSpan

In models whose rows end with tokens of text, the expanded ids have these, too; and those around each image, if any.

Only a template writes placeholders: the text of a client that looks like one stays text (router/text/image_marks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pdserve.errors import RequestError
from pdserve.image_tokens import ids_of_image
from pdserve.images import ImageInput, Images, ImageSpan


class Grid(Protocol):
    """A LoadedImage."""

    @property
    def digest(self) -> bytes: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


def expand(token_ids: bytes, accepted: ImageInput, images: Sequence[Grid]) -> tuple[bytes, Images]:
    """Replace the placeholder of each image by its tokens. ``token_ids`` are packed, as are those returned.

    Raises RequestError if the placeholders are not as many as the images, or if no text follows the last one.
    """
    ids = np.frombuffer(token_ids, "<u4")
    places = (ids == accepted.token_id).nonzero()[0]
    if len(places) != len(images):
        raise RequestError(
            f"the conversation has {len(images)} images, and the model's chat template shows {len(places)}; send them "
            "where the template shows them, such as in messages of the user"
        )
    if not images:
        return token_ids, ()
    if places[-1] == len(ids) - 1:
        raise RequestError("the prompt ends with an image; let a text follow it, or set add_generation_prompt")
    has_before = bool(accepted.before)
    sizes = np.array([image.rows * image.columns for image in images]) + has_before + bool(accepted.behind)
    counts = np.ones(len(ids), np.int64)
    counts[places] = sizes
    starts = places + np.cumsum(sizes) - sizes - np.arange(len(images)) + has_before
    spans = tuple(
        ImageSpan(start=int(start), rows=image.rows, columns=image.columns, digest=image.digest)
        for start, image in zip(starts, images, strict=True)
    )
    expanded = np.repeat(ids, counts)
    if accepted.row_end:
        for span in spans:
            expanded[span.start : span.end] = ids_of_image(accepted, span.rows, span.columns)
    if accepted.before:
        expanded[starts - 1] = accepted.before
    if accepted.behind:
        expanded[[span.end for span in spans]] = accepted.behind
    return expanded.tobytes(), spans
