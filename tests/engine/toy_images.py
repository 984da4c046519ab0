"""A toy runner that sees: its tokens depend on the images, and it asserts that a step has the embeddings it needs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from zlib import crc32

import msgspec
from toy import ToyRunner, ToyStep
from toy_node import BLOCK, Node

from engine.images.encoding import EncodingCosts, ImageEncoding
from engine.images.image_steps import ImagesFactory
from pdserve.images import PIXEL_BYTES, EncodingCost, ImageInput, Images, ImageSpan, images_among
from pdserve.ipc.messages import DropPixels, Mode, PutPixels, Submit
from pdserve.pausing import Pausing
from pdserve.records import NewSequence, StepPlan
from pdserve.sampling_params import SamplingParams

PLACEHOLDER = 9
CELL = 2  # pixels
TOKEN_BYTES = 10  # embeddings of a token
DEPTH = 5  # blocks of the tower
INPUT = ImageInput(
    token_id=PLACEHOLDER, patch_size=1, merge_size=CELL, min_pixels=4, max_pixels=1 << 12, fingerprint=bytes(32)
)


def images_of(cache: int, token_cost: float = 0.5, slope: float = 0.0, whole: bool = False) -> ImagesFactory:
    """Return the images of a node whose embeddings have room for ``cache`` tokens."""
    costs = EncodingCosts(
        accepted=INPUT,
        cache=cache * TOKEN_BYTES,
        token_bytes=TOKEN_BYTES,
        token_cost=EncodingCost(token_cost, slope),
        least=BLOCK,
        depth=DEPTH,
        whole=whole,
    )
    return partial(ImageEncoding, costs)


class Picture:
    """An image of rows × columns tokens; its number is its content."""

    def __init__(self, number: int, rows: int = 1, columns: int = 4) -> None:
        self.rows = rows
        self.columns = columns
        self.digest = number.to_bytes(32, "little")
        self.pixels = bytes([number % 256]) * (rows * columns * CELL**2 * PIXEL_BYTES)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    def parts(self, size: int = 1 << 18) -> list[PutPixels]:
        starts = range(0, len(self.pixels), size)
        return [
            PutPixels(self.digest, self.pixels[at : at + size], last=at + size >= len(self.pixels)) for at in starts
        ]


def prompt_of(*parts: int | Picture) -> tuple[list[int], Images]:
    """Return the ids and images of a prompt; a number is so many tokens of text."""
    ids: list[int] = []
    images: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, int):
            ids += range(100 + len(ids), 100 + len(ids) + part)
        else:
            images.append(ImageSpan(len(ids), part.rows, part.columns, part.digest))
            ids += [PLACEHOLDER] * part.num_tokens
    return ids, tuple(images)


def seen(ids: Sequence[int], images: Images) -> list[int]:
    """Return the prompt as the toy sees it: each token of an image follows from its pixels and place in the image."""
    tokens = list(ids)
    for span in images:
        for cell in range(span.num_tokens):
            tokens[span.start + cell] = 10_000 + crc32(span.digest, cell) % 50_000
    return tokens


class SeeingRunner(ToyRunner):
    """``encoded`` has the digests of all encodings in order."""

    capacity = 0  # tokens; 0: no limit
    whole = False  # a step computes all tokens of an image that have no KV

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # Node's
        self.encoded: list[bytes] = []
        self.embeddings: dict[bytes, int] = {}  # tokens, by digest
        self.partial: dict[bytes, tuple[int, int]] = {}  # blocks and tokens of the image between two pieces
        self._prompts: dict[int, tuple[Images, int]] = {}  # with the tokens that have KV, by sequence

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[ToyStep]:
        self._encode(plan)
        for seq in plan.finished:
            del self._prompts[seq]
        for new in plan.new:
            self._prompts[new.seq] = new.images, new.num_computed
        for item in plan.scheduled:
            images, begin = self._prompts[item.seq]
            end = begin + item.num_tokens
            self._prompts[item.seq] = images, end  # more than that, if drafts are wrong
            for span in images_among(images, begin, end):
                assert span.digest in self.embeddings, "a step computes tokens of an image without its embeddings"
                assert not self.whole or end >= span.end, "a step ends inside an image"
        new_sequences = tuple(_seeing(new) for new in plan.new)
        return (yield from super().launch_with_pauses(msgspec.structs.replace(plan, new=new_sequences)))

    def _encode(self, plan: StepPlan) -> None:
        for digest in plan.dropped_images:
            assert (self.embeddings.pop(digest, None) is None) != (self.partial.pop(digest, None) is None)
        for image in plan.images:
            tokens = image.height * image.width // CELL**2
            assert image.digest not in self.embeddings, "an image is encoded that has embeddings"
            assert (image.first, tokens) == self.partial.pop(image.digest, (0, tokens)), "a piece does not follow"
            assert image.first < image.last <= image.depth == DEPTH
            if image.begins:
                assert len(image.pixels) == image.height * image.width * PIXEL_BYTES
                assert set(image.pixels) == {image.digest[0]}, "the pixels are those of another image"
            else:
                assert not image.pixels
            if image.ends:
                self.embeddings[image.digest] = tokens
                self.encoded.append(image.digest)
            else:
                self.partial[image.digest] = image.last, tokens
                assert len(self.partial) == 1, "two images are partial"
        held = sum(self.embeddings.values()) + sum(tokens for _, tokens in self.partial.values())
        assert not self.capacity or held <= self.capacity


def _seeing(new: NewSequence) -> NewSequence:
    tokens = seen(new.tokens(0, new.num_tokens), new.images)
    return msgspec.structs.replace(new, token_ids=array("I", tokens).tobytes())


class SeeingNode(Node):
    """A node with a tower whose embeddings have room for ``cache`` tokens."""

    def __init__(
        self,
        num_blocks: int,
        depth: int = 1,
        stages: int = 1,
        *,
        cache: int,
        cost: float = 0.5,
        whole: bool = False,
        **options: object,
    ) -> None:
        """``whole``: tokens of an image see its later ones, so a step computes them together."""
        fields = {"images": images_of(cache, cost, whole=whole), "whole_images": whole, **options}
        super().__init__(num_blocks, depth, stages, runner=SeeingRunner, **fields)  # type: ignore[arg-type]
        self.seeing.capacity = cache
        self.seeing.whole = whole

    @property
    def seeing(self) -> SeeingRunner:
        assert isinstance(self.runner, SeeingRunner)
        return self.runner

    def put(self, *pictures: Picture) -> None:
        for part in (part for picture in pictures for part in picture.parts()):
            self.obey(part)

    def drop(self, *pictures: Picture) -> None:
        for picture in pictures:
            self.obey(DropPixels(picture.digest))


def ask(
    node: Node,
    rid: int,
    prompt: tuple[list[int], Images],
    *,
    mode: Mode = Mode.LOCAL,
    max_tokens: int = 1,
    **fields: object,
) -> None:
    """Submit a prompt with images."""
    ids, images = prompt
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    values = {"sampling": sampling, "mode": mode, **fields}
    node.obey(Submit(rid=rid, token_ids=array("I", ids).tobytes(), images=images, **values))  # type: ignore[arg-type]
