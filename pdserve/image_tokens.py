"""The token ids of an image in a prompt, and which of them have embeddings of the tower."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.images import ImageInput, ImageSpan


def ids_of_image(accepted: ImageInput, rows: int, columns: int) -> NDArray[np.uint32]:
    """Return the ids [rows · columns] of an image: placeholders, and the text that ends rows."""
    ids = np.full((rows, columns), accepted.token_id, "<u4")
    if accepted.row_end:
        ids[:, -1] = accepted.row_end
        ids[-1, -1] = accepted.image_end
    return ids.ravel()


def embedded_tokens(accepted: ImageInput, span: ImageSpan, first: int, last: int) -> NDArray[np.int64]:
    """Return those of the tokens first … last - 1 of an image whose embeddings are the tower's."""
    tokens = np.arange(first, last)
    return tokens[tokens % span.columns != span.columns - 1] if accepted.row_end else tokens
