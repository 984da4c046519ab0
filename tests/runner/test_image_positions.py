"""Positions of prompts with images, against the library."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from pdserve.image_positions import rope_delta, rope_offsets
from pdserve.images import Images, ImageSpan

MERGE = 2
_VISION = SimpleNamespace(spatial_merge_size=MERGE)
LIBRARY = SimpleNamespace(
    config=SimpleNamespace(vision_config=_VISION),
    get_vision_position_ids=partial(Qwen3VLModel.get_vision_position_ids, None),
)
#: Text before an image and its grid. Templates put a token before and after each image: the library needs them apart.
PARTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 9)), max_size=5)


def laid_out(parts: list[tuple[int, int, int]], tail: int) -> tuple[Images, int]:
    """Return the images of a prompt, and its length."""
    spans = []
    end = 0
    for text, rows, columns in parts:
        spans.append(ImageSpan(end + text, rows, columns, bytes(32)))
        end = spans[-1].end
    return tuple(spans), end + tail


def of_library(images: Images, length: int) -> tuple[np.ndarray, int]:
    """Return the positions [3, length] of a prompt, and the delta of what follows it."""
    types = torch.zeros((1, length), dtype=torch.int32)
    for span in images:
        types[0, span.start : span.end] = 1
    grids = torch.tensor([[1, MERGE * span.rows, MERGE * span.columns] for span in images]) if images else None
    ids = torch.zeros((1, length), dtype=torch.int64)
    positions, delta = Qwen3VLModel.get_rope_index(LIBRARY, ids, types, grids)
    return positions[:, 0].numpy(), int(delta[0, 0])


@given(PARTS, st.integers(1, 12))
def test_positions_are_the_library_s(parts: list[tuple[int, int, int]], tail: int) -> None:
    images, length = laid_out(parts, tail)
    positions, delta = of_library(images, length)
    assert np.array_equal(np.arange(length) + rope_offsets(images, 0, length), positions)
    assert rope_delta(images) == delta


@given(PARTS, st.integers(1, 12), st.data())
def test_a_chunk_has_the_offsets_of_its_tokens(
    parts: list[tuple[int, int, int]], tail: int, data: st.DataObject
) -> None:
    images, length = laid_out(parts, tail)
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length + 20))
    whole = rope_offsets(images, 0, length + 20)
    assert np.array_equal(rope_offsets(images, start, end), whole[:, start:end])
    assert (whole <= 0).all(), "a table of as many rows as the model's length has every position"
    assert (whole[:, length:] == rope_delta(images)).all(), "decoded tokens"


def test_text_has_no_offsets() -> None:
    assert not rope_offsets((), 5, 9).any()
    assert rope_offsets((), 5, 9).shape == (3, 4)
    assert rope_delta(()) == 0
