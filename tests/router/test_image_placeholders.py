"""Placeholders of images: expanded once, and never made of a client's text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_checkpoints import VISION_TOKENS, write_tokenizer
from small_tokenizers import SPECIAL

from pdserve.errors import RequestError
from pdserve.images import ImageInput, ImageSpan
from pdserve.rpc.protobuf import pack_tokens, unpack_tokens
from router.images.placeholders import expand
from router.text.chat.template import ChatTemplate, RenderRequest
from router.text.image_marks import MARK, ImageToken, encode_marked, restored
from router.text.tokenizer import Tokenizer

PAD = 7
PAD_TEXT = "<|image_pad|>"


TAKEN = ImageInput(PAD, 16, 2, 1024, 1 << 20, bytes(32))
#: Rows end with tokens of text.
ROWS = ImageInput(PAD, 14, 2, 784, 1540**2, bytes(32), max_side=1540, row_end=12, image_end=13)


class Picture(NamedTuple):
    digest: bytes
    rows: int
    columns: int


pictures = st.builds(Picture, st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(1, 9))
texts = st.lists(st.integers(0, 2**32 - 1).filter(lambda token_id: token_id != PAD), max_size=5)


@given(st.lists(st.tuples(texts, pictures), max_size=6), texts.filter(bool))
def test_expanded_prompt_has_each_image_in_its_place(parts: list[tuple[list[int], Picture]], last: list[int]) -> None:
    packed = [*(token_id for text, _ in parts for token_id in (*text, PAD)), *last]
    token_ids, spans = expand(pack_tokens(packed), TAKEN, [picture for _, picture in parts])
    expected: list[int] = []
    for (text, picture), span in zip(parts, spans, strict=True):
        expected += text
        assert span == ImageSpan(len(expected), picture.rows, picture.columns, picture.digest)
        expected += [PAD] * (picture.rows * picture.columns)
    assert list(unpack_tokens(token_ids)) == expected + last


@given(st.lists(st.tuples(texts, pictures), max_size=6), texts.filter(bool), st.booleans(), st.booleans())
def test_tokens_of_text_are_around_images(
    parts: list[tuple[list[int], Picture]], last: list[int], before: bool, behind: bool
) -> None:
    taken = ImageInput(PAD, 16, 3, 2304, 1 << 20, bytes(32), before=12 * before, behind=13 * behind, fills=True)
    packed = [*(token_id for text, _ in parts for token_id in (*text, PAD)), *last]
    token_ids, spans = expand(pack_tokens(packed), taken, [picture for _, picture in parts])
    expected: list[int] = []
    for (text, picture), span in zip(parts, spans, strict=True):
        expected += [*text, *[12] * before]
        assert span == ImageSpan(len(expected), picture.rows, picture.columns, picture.digest)
        expected += [*[PAD] * (picture.rows * picture.columns), *[13] * behind]
    assert list(unpack_tokens(token_ids)) == expected + last


@given(st.lists(st.tuples(texts, pictures), min_size=1, max_size=6), texts.filter(bool))
def test_rows_end_with_tokens_of_text(parts: list[tuple[list[int], Picture]], last: list[int]) -> None:
    pictures = [picture._replace(columns=picture.columns + 1) for _, picture in parts]
    packed = [*(token_id for text, _ in parts for token_id in (*text, PAD)), *last]
    token_ids, spans = expand(pack_tokens(packed), ROWS, pictures)
    expected: list[int] = []
    for (text, _), picture, span in zip(parts, pictures, spans, strict=True):
        expected += text
        assert span == ImageSpan(len(expected), *picture[1:], picture.digest)
        rows = [[PAD] * (picture.columns - 1) + [12] for _ in range(picture.rows)]
        expected += [*[token_id for row in rows for token_id in row][:-1], 13]
        assert span.end == len(expected)
    assert list(unpack_tokens(token_ids)) == expected + last


@pytest.mark.parametrize(("ids", "said"), [([1, PAD, 2], "2 images, and .* shows 1"), ([1, 2], "shows 0")])
def test_other_number_of_placeholders_is_refused(ids: list[int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        expand(pack_tokens(ids), TAKEN, [Picture(bytes(32), 1, 2)] * 2)


def test_prompt_that_ends_with_an_image_is_refused() -> None:
    with pytest.raises(RequestError, match="ends with an image"):
        expand(pack_tokens([1, PAD]), TAKEN, [Picture(bytes(32), 1, 1)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tokenizer(path)
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def token(tokenizer: Tokenizer) -> ImageToken:
    token_id = tokenizer.added_token_id(PAD_TEXT)
    assert token_id is not None
    return ImageToken(PAD_TEXT, token_id)


tokens = st.sampled_from([*VISION_TOKENS, *SPECIAL])
pieces = st.text("<|image_pd>a \n\ue000", max_size=20) | tokens | st.text(max_size=9)
user_texts = st.lists(pieces, max_size=8).map("".join)


@settings(deadline=None)
@given(user_texts, user_texts, st.integers(0, 3))
def test_texts_of_clients_never_become_placeholders(
    tokenizer: Tokenizer, token: ImageToken, before: str, after: str, num_images: int
) -> None:
    template = tokenizer.chat_template
    assert template is not None
    content = [
        {"type": "text", "text": before},
        *({"type": "image", "number": number} for number in range(num_images)),
        {"type": "text", "text": after},
    ]
    request = RenderRequest([{"role": "user", "content": content}], image_token=PAD_TEXT, image_mark=MARK)
    marked = ChatTemplate(request.template_source(template.source), template.special_tokens)
    rendered = marked.render(request)
    try:
        ids = encode_marked(tokenizer, rendered, token, False)
    except RequestError:
        assert PAD_TEXT in before + after
        assert all(special in rendered for special in tokenizer.special_tokens() if special != PAD_TEXT)
        return
    assert ids.count(token.token_id) == num_images
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(restored(rendered, token), False))
    if PAD_TEXT not in before + after:
        assert ids == tokenizer.encode(restored(rendered, token), False)


def test_images_lie_where_the_template_shows_them(tokenizer: Tokenizer, token: ImageToken) -> None:
    """Texts that look like placeholders stand before, between and behind them."""
    rendered = f"{PAD_TEXT}a{MARK}{PAD_TEXT}{PAD_TEXT}{MARK}b<|im{PAD_TEXT}"
    ids = encode_marked(tokenizer, rendered, token, False)
    parts: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == token.token_id:
            parts.append([])
        else:
            parts[-1].append(token_id)
    assert [tokenizer.decode(part) for part in parts] == [f"{PAD_TEXT}a", PAD_TEXT * 2, f"b<|im{PAD_TEXT}"]


def test_text_with_all_special_tokens_is_refused(tokenizer: Tokenizer, token: ImageToken) -> None:
    with pytest.raises(RequestError, match="stands for an image"):
        encode_marked(tokenizer, "".join(tokenizer.special_tokens()), token, False)
