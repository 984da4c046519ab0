"""Positions of a prompt with images (M-RoPE), derived from its spans on every node that needs them.

    token ids  9  [image] [image] [image] [image] [image] [image]  7 …     a span with start=1, rows=2, columns=3
    t          0     1       1       1       1       1       1     4 …     an image takes max(rows, columns) positions
    h          0     1       1       1       2       2       2     4 …
    w          0     1       2       3       1       2       3     4 …

No position is larger than the token's index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.images import Images, ImageSpan


def rope_offsets(images: Images, start: int, end: int) -> NDArray[np.int64]:
    """Return [3 (time, height, width), end - start]: the position of each token on each axis, minus its index; ≤ 0."""
    offsets = np.zeros((3, max(0, end - start)), np.int64)
    shift = 0  # offset of the text before the image
    for span in images:
        first = max(start, span.start)
        last = min(end, span.end)
        if first < last:
            cells = np.arange(first - span.start, last - span.start)
            part = offsets[:, first - start : last - start]
            part[:] = shift - cells
            part[1] += cells // span.columns
            part[2] += cells % span.columns
        shift += _shift(span)
        if span.end < end:
            offsets[:, max(0, span.end - start) :] = shift
    return offsets


def rope_delta(images: Images) -> int:
    """Return position - index of the tokens behind the last image, on all axes; ≤ 0."""
    return sum(map(_shift, images))


def _shift(span: ImageSpan) -> int:
    return max(span.rows, span.columns) - span.num_tokens
