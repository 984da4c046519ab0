"""The images of a prompt that a node refuses, before it waits for pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_node import PLACEHOLDER, Picture, config_with_images, prompt_with

from node.request_checks import check_choices, check_images
from pdserve.config.node_config import NodeConfig
from pdserve.errors import RequestError
from pdserve.images import ImageMode, ImageSpan
from pdserve.kv.groups import KVCacheGroups
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.field_ranges import check_message
from pdserve.rpc.protobuf import images_to_pb, pack_tokens

A = bytes(32)
B = bytes([1] * 32)
IDS = [1, *[PLACEHOLDER] * 6, 2, *[PLACEHOLDER] * 4, 3]  # images of 2 × 3 and 2 × 2 tokens


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> NodeConfig:
    return config_with_images(checkpoint)


def check(config: NodeConfig, *spans: ImageSpan, ids: list[int] = IDS, **options: Any) -> tuple[ImageSpan, ...]:
    return check_images(images_to_pb(spans), pack_tokens(ids), config, **options)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([ImageSpan(1, 2, 3, b"")], "image 1 of 1, at token 1, has a digest of 0 bytes, not 32"),
        ([ImageSpan(1, 2, 3, bytes(64))], "a digest of 64 bytes"),
        ([ImageSpan(8, 2, 2, B), ImageSpan(1, 2, 3, A)], "image 2 of 2, at token 1, begins before token 12"),
        ([ImageSpan(1, 2, 3, A), ImageSpan(6, 1, 1, B)], "begins before token 7, the end of the image before it"),
        ([ImageSpan(1, 2, 3, A), ImageSpan(1, 2, 3, A)], "begins before token 7"),
        ([ImageSpan(8, 1, 5, A)], "ends at token 13; it must end at token 12 or before"),
        ([ImageSpan(8, 4096, 4096, A)], "ends at token 16777224"),
        ([ImageSpan(2**32 - 1, 1, 1, A)], "ends at token 4294967296"),
        ([ImageSpan(0, 2, 3, A)], "has token 1 in its place 0, not the placeholder 9"),
        ([ImageSpan(1, 1, 7, A)], "has token 2 in its place 7"),
        ([ImageSpan(1, 2, 3, A), ImageSpan(8, 2, 2, A)], "2 × 2 tokens; an image of the same digest has 2 × 3"),
    ],
)
def test_spans_that_do_not_fit_the_prompt_are_refused(spans: list[ImageSpan], words: str, config: NodeConfig) -> None:
    with pytest.raises(RequestError, match="image") as raised:
        check(config, *spans)
    assert words in str(raised.value)
    assert raised.value.param == "images"


def test_placeholders_that_no_span_names_are_text(config: NodeConfig) -> None:
    assert check(config) == ()
    spans = (ImageSpan(8, 2, 2, B),)
    assert check(config, *spans) == spans


def test_an_image_at_the_end_needs_no_text_only_in_a_pull(config: NodeConfig) -> None:
    spans = (ImageSpan(8, 2, 2, B),)
    with pytest.raises(RequestError, match="it must end at token 11 or before"):
        check(config, *spans, ids=IDS[:-1])
    assert check(config, *spans, ids=IDS[:-1], last_text=0) == spans


def test_images_larger_than_the_model_takes_are_refused(config: NodeConfig) -> None:
    ids, spans = prompt_with(Picture(250, 263))
    with pytest.raises(RequestError, match="has 1000 × 1052 pixels, more than the 1048576 that this model takes"):
        check(config, *spans, ids=ids)


ROW_IDS = [1, *[PLACEHOLDER] * 2, 5, *[PLACEHOLDER] * 2, 6, 2, 3]  # an image of 2 rows of 2 tokens and their ends


@pytest.fixture(scope="module")
def config_with_row_ends(config: NodeConfig) -> NodeConfig:
    assert config.image_input is not None
    side = 3 * config.image_input.cell
    accepted = msgspec.structs.replace(config.image_input, max_side=side - 1, row_end=5, image_end=6)
    return msgspec.structs.replace(config, image_input=accepted)


@pytest.mark.parametrize(
    ("span", "change", "words"),
    [
        ((1, 2, 2), {}, "has token 9 in its place 2, not the end of a row 5"),
        ((1, 2, 3), {3: PLACEHOLDER}, "has token 9 in its place 3, not the end of a row 5"),
        ((1, 2, 3), {6: 5}, "has token 5 in its place 6, not the end of a row 6"),
        ((1, 2, 3), {4: 6}, "has token 6 in its place 4, not the placeholder 9"),
        ((1, 1, 3), {}, "has token 5 in its place 3, not the end of a row 6"),
        ((3, 1, 1), {}, "has 1 columns; a row ends with a token of text in this model, so it has at least 2"),
        ((1, 1, 5), {}, "has 4 × 16 pixels; a side has at most 12 in this model"),
    ],
)
def test_rows_end_with_the_tokens_of_the_model(
    span: tuple[int, int, int], change: dict[int, int], words: str, config_with_row_ends: NodeConfig
) -> None:
    right = ImageSpan(1, 2, 3, A)
    assert check(config_with_row_ends, right, ids=ROW_IDS) == (right,)
    ids = [change.get(index, token_id) for index, token_id in enumerate(ROW_IDS)]
    with pytest.raises(RequestError) as raised:
        check(config_with_row_ends, ImageSpan(*span, A), ids=ids)
    assert words in str(raised.value)


@pytest.mark.parametrize("mode", [ImageMode.NONE, ImageMode.POSITIONS])
def test_a_node_takes_images_only_if_it_knows_their_positions(mode: ImageMode, checkpoint: Path) -> None:
    config = config_with_images(checkpoint, mode)
    if mode is ImageMode.POSITIONS:
        assert check(config, ImageSpan(1, 2, 3, A))
    else:
        with pytest.raises(RequestError, match=r"has 1 images, and this node takes text only; .* --images on"):
            check(config, ImageSpan(1, 2, 3, A))
    assert check(config) == ()


def test_more_images_than_a_prompt_may_have_are_refused_by_their_number() -> None:
    request = pb.Generate(images=[pb.ImageSpan(rows=1, columns=1)] * 100)
    check_message(request)
    request.images.add(rows=1, columns=1)
    with pytest.raises(RequestError, match=r"images has 101 entries; the limit is 100"):
        check_message(request)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.data())
def test_what_is_accepted_covers_placeholders_without_overlap(
    config: NodeConfig, shifts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Spans of a right prompt, moved and cut at random: the check never lets another token pass as an image."""
    ids, spans = prompt_with(*(Picture(rows, columns, value=index) for index, (_, rows, columns) in enumerate(shifts)))
    moved = tuple(
        ImageSpan(max(0, span.start + shift), data.draw(st.integers(1, 4)), span.columns, span.digest)
        for span, (shift, _, _) in zip(spans, shifts, strict=True)
    )
    try:
        accepted = check(config, *moved, ids=ids)
    except RequestError:
        return
    covered = [index for span in accepted for index in range(span.start, span.end)]
    assert covered == sorted(set(covered))
    assert all(ids[index] == PLACEHOLDER for index in covered)
    assert len(ids) - 1 not in covered, "the last token is text"


@pytest.mark.parametrize(
    ("mode", "n", "start", "windows", "refused"),
    [
        (ImageMode.POSITIONS, 2, 11, True, True),
        (ImageMode.POSITIONS, 2, 10, True, False),
        (ImageMode.POSITIONS, 1, 11, True, False),
        (ImageMode.TOWER, 2, 11, True, False),
        (ImageMode.POSITIONS, 2, 11, False, False),
    ],
)
def test_choices_may_not_need_an_image_again(
    mode: ImageMode, n: int, start: int, windows: bool, refused: bool, checkpoint: Path
) -> None:
    """Blocks have 16 tokens: an image of 6 tokens that starts at token 10 ends with the first block.

    Choices of a model without windows begin with a copy of the last block.
    """
    config = config_with_images(checkpoint, mode)
    assert config.kv_layout.block_size == 16
    if windows:
        layout = msgspec.structs.replace(config.kv_layout, groups=KVCacheGroups((None, 4), (0, 1)))
        config = msgspec.structs.replace(config, kv_layout=layout)
    images = (ImageSpan(start, 2, 3, A),)
    if refused:
        with pytest.raises(RequestError, match="n is 2, and the last 2 tokens of the prompt") as raised:
            check_choices(images, n, 18, config)
        assert raised.value.param == "n"
    else:
        check_choices(images, n, 18, config)
