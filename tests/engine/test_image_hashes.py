"""Block hashes of prompts with images: text keeps its hashes, and unequal images share no block."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_images import images_of
from toy_node import BLOCK, Node

from pdserve.hashing import BlockHashes, hash_block_tokens, root_hash, short_block_hashes
from pdserve.images import Images, ImageSpan, block_extra, block_images, first_needed, image_digest
from pdserve.ipc.messages import DropPixels, FreeLease, LeaseCached, Mode, PutPixels, Submit
from pdserve.rpc.protobuf import images_from_pb, images_to_pb
from pdserve.sampling_params import SamplingParams
from router.fleet.prefix_index import PromptPrefix

PLACEHOLDER = 7
ROOT = root_hash("")
#: Computed before hashes could have images.
PINNED = [
    "65cfb6fa1d5b2152b7eb0b003735d4f8",
    "b053e9e9b22cc6bb3c8d867b7e6b1ba7",
    "5ad637d8a30281f5e27e5f75c9e51355",
]
PINNED_WITH_SALT = "a527d642b840ea3c42adc691bd8d9fca"


def digest_of(number: int) -> bytes:
    return sha256(bytes([number])).digest()


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[array[int], Images]:
    """Return the ids of a prompt with 1 … 4 images, and their spans."""
    ids = array("I")
    spans = []
    for number in range(draw(st.integers(1, 4))):
        ids.extend(draw(st.lists(st.integers(0, 20), max_size=9)))
        rows = draw(st.integers(1, 5))
        columns = draw(st.integers(1, 5))
        spans.append(ImageSpan(len(ids), rows, columns, digest_of(number)))
        ids.extend([PLACEHOLDER] * (rows * columns))
    ids.extend(draw(st.lists(st.integers(0, 20), min_size=1, max_size=9)))
    return ids, tuple(spans)


def hashes_of(ids: array[int], images: Images, block_size: int) -> list[bytes]:
    return BlockHashes(block_size, ROOT, images=images).upto(ids, len(ids))


def test_text_hashes_are_those_of_earlier_releases() -> None:
    ids = array("I", range(12))
    hashes = BlockHashes(4, root_hash("")).upto(ids, 12)
    assert [block_hash.hex() for block_hash in hashes] == PINNED
    assert BlockHashes(4, root_hash("pepper")).upto(ids, 4)[0].hex() == PINNED_WITH_SALT
    assert short_block_hashes(ids.tobytes(), 4, ROOT) == [int.from_bytes(digest[:8], "little") for digest in hashes]
    assert hash_block_tokens(ROOT, ids[:4]) == hashes[0] == hash_block_tokens(ROOT, ids[:4], b"")


@given(laid_out(), st.integers(1, 9), st.data())
def test_prompts_with_unequal_images_share_no_block_from_there(
    prompt: tuple[array[int], Images], block_size: int, data: st.DataObject
) -> None:
    """The other image has the same size, and the same ids."""
    ids, images = prompt
    changed = data.draw(st.integers(0, len(images) - 1))
    other = tuple(
        ImageSpan(span.start, span.rows, span.columns, digest_of(99)) if index == changed else span
        for index, span in enumerate(images)
    )
    mine = hashes_of(ids, images, block_size)
    theirs = hashes_of(ids, other, block_size)
    first = images[changed].start // block_size
    assert mine[:first] == theirs[:first]
    assert not set(mine[first:]) & set(theirs[first:])


@given(laid_out(), st.integers(1, 9))
def test_an_image_is_unlike_its_placeholders_as_text(prompt: tuple[array[int], Images], block_size: int) -> None:
    ids, images = prompt
    first = images[0].start // block_size
    assert not set(hashes_of(ids, images, block_size)[first:]) & set(hashes_of(ids, (), block_size)[first:])


@given(laid_out(), st.integers(1, 9))
def test_engine_and_router_compute_the_same_hashes(prompt: tuple[array[int], Images], block_size: int) -> None:
    ids, images = prompt
    hashes = hashes_of(ids, images, block_size)
    short = short_block_hashes(ids.tobytes(), block_size, ROOT, images)
    assert short == [int.from_bytes(digest[:8], "little") for digest in hashes]
    assert list(BlockHashes(block_size, ROOT, images=images).one_by_one(ids, len(ids))) == hashes
    half = len(hashes) // 2
    assert BlockHashes(block_size, ROOT, hashes[:half], images=images).upto(ids, len(ids)) == hashes


@given(laid_out(), st.integers(1, 9), st.integers(1, 9))
def test_the_same_image_elsewhere_in_a_prompt_shares_no_block(
    prompt: tuple[array[int], Images], block_size: int, more: int
) -> None:
    """A block hash covers the prefix and the image's place, also where the ids of the blocks are equal."""
    ids, images = prompt
    moved = tuple(ImageSpan(span.start + more, span.rows, span.columns, span.digest) for span in images)
    longer = array("I", [PLACEHOLDER] * more) + ids
    mine = hashes_of(ids, images, block_size)
    theirs = hashes_of(longer, moved, block_size)
    first = images[0].start // block_size
    assert not set(mine[first:]) & set(theirs)


@given(laid_out(), st.integers(0, 60), st.integers(1, 20))
def test_a_block_names_the_images_with_tokens_in_it(prompt: tuple[array[int], Images], start: int, size: int) -> None:
    _, images = prompt
    there = [span for span in images if set(range(span.start, span.end)) & set(range(start, start + size))]
    assert block_images(images, start, start + size) == tuple((span.digest, span.start - start) for span in there)
    extra = block_extra(images, start, start + size)
    assert extra == b"".join(span.digest + (span.start - start).to_bytes(4, "little", signed=True) for span in there)


@given(laid_out(), st.integers(0, 150))
def test_first_needed_is_the_first_image_with_an_uncomputed_token(
    prompt: tuple[array[int], Images], computed: int
) -> None:
    _, images = prompt
    uncomputed = [span for span in images if any(index >= computed for index in range(span.start, span.end))]
    assert first_needed(images, computed) == (uncomputed[0] if uncomputed else None)


@given(laid_out())
def test_spans_survive_a_message(prompt: tuple[array[int], Images]) -> None:
    _, images = prompt
    assert images_from_pb(images_to_pb(images)) == images


def test_digest_covers_pixels_size_and_processor() -> None:
    pixels = bytes(range(24))
    fingerprint = digest_of(0)
    expected = sha256(b"pdserve image 1\0" + fingerprint + b"\2\0\0\0\4\0\0\0" + pixels).digest()
    assert image_digest(fingerprint, 2, 4, pixels) == image_digest(fingerprint, 2, 4, memoryview(pixels)) == expected
    others = {
        image_digest(fingerprint, 4, 2, pixels),
        image_digest(digest_of(1), 2, 4, pixels),
        image_digest(fingerprint, 2, 4, pixels[::-1]),
    }
    assert len(others | {expected}) == 4


def test_router_looks_for_the_blocks_of_the_images() -> None:
    ids = array("I", [1, *[PLACEHOLDER] * 6, 2])
    images = (ImageSpan(1, 2, 3, digest_of(0)),)
    hashes = PromptPrefix(ids.tobytes(), ROOT, images).hashes(2)
    assert hashes == [int.from_bytes(digest[:8], "little") for digest in hashes_of(ids, images, 2)]
    assert not set(hashes) & set(PromptPrefix(ids.tobytes(), ROOT).hashes(2))


PROMPT = [1, 2, 3, 4, 5, *[PLACEHOLDER] * 6, 6, 7, 8, 9, 10, 11]


def submit(node: Node, rid: int, number: int) -> int:
    """Serve PROMPT with an image of this number; return the tokens found in the prefix cache."""
    span = ImageSpan(5, 2, 3, digest_of(number))
    node.obey(PutPixels(span.digest, bytes([number]), last=True))
    tokens = array("I", PROMPT).tobytes()
    node.obey(Submit(rid, tokens, SamplingParams(max_tokens=1), Mode.LOCAL, images=(span,)))
    prefilled = []
    while not node.engine.idle:
        prefilled += node.step().prefilled
    node.obey(DropPixels(span.digest))
    return prefilled[0].cached_tokens


def test_engine_serves_no_prompt_with_the_kv_of_another_image() -> None:
    """One image has equal size and ids, the other prompt equal ids without an image."""
    node = Node(64, 1, images=images_of(64))
    assert BLOCK == 4
    assert submit(node, 1, number=0) == 0
    assert submit(node, 2, number=1) == 4, "the text before the image"
    assert submit(node, 3, number=0) == 16
    assert submit(node, 4, number=1) == 16
    node.submit(5, PROMPT, SamplingParams(max_tokens=1), Mode.LOCAL)
    assert [event.cached_tokens for event in node.step().prefilled] == [4]
    node.run()
    node.close()


@pytest.mark.parametrize(("number", "num_blocks"), [(0, 4), (1, 1), (None, 1)])
def test_a_pull_leases_the_blocks_of_its_images_only(number: int | None, num_blocks: int) -> None:
    node = Node(64, 1, images=images_of(64))
    submit(node, 1, number=0)
    images = () if number is None else (ImageSpan(5, 2, 3, digest_of(number)),)
    node.obey(LeaseCached(9, array("I", PROMPT).tobytes(), "", 0, images=images))
    assert [len(leased.block_ids) for leased in node.step().leased] == [num_blocks]
    node.obey(FreeLease(9))
    node.assert_all_free()
    node.close()
