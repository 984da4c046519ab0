"""Prompts with images through real nodes whose engines are simulated: P encodes, D continues, and nothing is mixed up.

A simulated token follows from the images, their places and all tokens before it; so equal answers prove the spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, NodeProcess
from machine import patience
from node_client import Generated, RouterClient, greedy

from pdserve.config.node_options import NodeOptions
from pdserve.image_tokens import ids_of_image
from pdserve.images import ImageInput, Images, ImageSpan, image_digest
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import image_input_from_pb, images_to_pb, pack_tokens

if "images" not in NodeOptions.__struct_fields__:  # until resolve gives simulated nodes a tower
    pytest.skip("nodes have no --images", allow_module_level=True)

BLOCK = 16
FLAGS = ("--engine", "simulated", "--block-size", str(BLOCK), "--max-model-len", "2048")
COSTS = ("--sim-costs", "prompt-token=0.001")  # seconds: a pull of some blocks is worth its time
SLOW = ("--sim-costs", "prompt-token=0.005")
GREEDY = greedy(6)


class Picture:
    """An image of one colour."""

    def __init__(self, accepted: ImageInput, rows: int, columns: int, value: int) -> None:
        self._fingerprint = accepted.fingerprint
        self.rows = rows
        self.columns = columns
        self.height, self.width = accepted.size(ImageSpan(0, rows, columns, b""))
        self.pixels = bytes([value]) * (3 * self.height * self.width)
        self.digest = image_digest(accepted.fingerprint, self.height, self.width, self.pixels)

    def put(self, node: NodeProcess) -> None:
        header = pb.ImageHeader(digest=self.digest, fingerprint=self._fingerprint, height=self.height, width=self.width)
        pieces = [pb.ImagePiece(header=header), pb.ImagePiece(data=self.pixels)]
        with node.channel() as channel:
            pb_grpc.ImageNodeStub(channel).Put(iter(pieces), timeout=patience(5.0))


Part = int | Picture
Prompt = tuple[list[int], Images]


@dataclass
class Nodes:
    """``alone`` encodes images itself and may pull from ``prefill``; ``decode`` encodes none."""

    prefill: NodeProcess
    decode: NodeProcess
    alone: NodeProcess
    accepted: ImageInput

    def picture(self, rows: int = 2, columns: int = 4, value: int = 0) -> Picture:
        return Picture(self.accepted, rows, columns, value)

    def prompt(self, *parts: Part, first: int = 5) -> Prompt:
        """Return the ids and images of a prompt; a number is so many tokens of text, which begin with ``first``."""
        ids = [first]
        images: list[ImageSpan] = []
        for part in parts:
            if isinstance(part, Picture):
                images.append(ImageSpan(len(ids), part.rows, part.columns, part.digest))
                ids += ids_of_image(self.accepted, part.rows, part.columns).tolist()
            else:
                ids += [10 + number % 50 for number in range(part)]
        return ids, tuple(images)


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("mistral3", marks=pytest.mark.slow)])
def checkpoint_that_sees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mistral's rows of images end with tokens of text."""
    from image_checkpoints import make_image_checkpoint

    return make_image_checkpoint(tmp_path_factory.mktemp("images") / "model", request.param)


def start(fleet: Fleet, checkpoint: Path, costs: Sequence[str] = COSTS) -> Nodes:
    prefill = fleet.start_prefill(checkpoint, [*FLAGS, *costs])
    decode = fleet.start_decode(checkpoint, [*FLAGS, *COSTS, "--handoff-min-tokens", "1000"])
    alone = fleet.start_decode(checkpoint, [*FLAGS, *COSTS, "--images", "on"])
    fleet.wait_ready()
    fleet.wait_until(lambda: all(len(node.describe().connected_peers) == 1 for node in (decode, alone)), 20.0)
    return Nodes(prefill, decode, alone, image_input_from_pb(prefill.describe().images))


@pytest.fixture(scope="module")
def all_nodes(checkpoint_that_sees: Path) -> Iterator[Nodes]:
    with Fleet() as fleet:
        yield start(fleet, checkpoint_that_sees)


@pytest.fixture
def nodes(all_nodes: Nodes) -> Iterator[Nodes]:
    """Yield all nodes. After the test they hold no block and no pixels."""
    yield all_nodes
    for node in (all_nodes.prefill, all_nodes.decode, all_nodes.alone):
        node.wait_idle()


def ask(node: NodeProcess, prompt: Prompt, prefill: NodeProcess | None = None, **fields: Any) -> Generated:
    ids, images = prompt
    with RouterClient(node.address) as client:
        name = "" if prefill is None else prefill.address
        return client.generate(ids, GREEDY, name, images=images_to_pb(images), **fields)


def alone_answer(nodes: Nodes, prompt: Prompt, *pictures: Picture) -> list[int]:
    for picture in pictures:
        picture.put(nodes.alone)
    return ask(nodes.alone, prompt).tokens


def counted(node: NodeProcess, name: str, action: Callable[[], object]) -> float:
    """Return by how much a counter grows."""
    before = node.counter(name)
    action()
    return node.counter(name) - before


def test_only_nodes_that_encode_images_say_so(nodes: Nodes) -> None:
    assert nodes.prefill.describe().images == nodes.alone.describe().images
    decode = nodes.decode.describe()
    assert not decode.HasField("images")
    assert decode.continued_images == nodes.prefill.describe().images
    assert not nodes.prefill.describe().HasField("continued_images")


def test_a_short_prompt_is_handed_off_if_its_pixels_are_there(nodes: Nodes) -> None:
    """A text of this length is computed on D."""
    picture = nodes.picture(value=1)
    prompt = nodes.prompt(20, picture, 20)
    handoffs = nodes.decode.counter("handoffs")
    encoded = nodes.prefill.counter("images_encoded")
    picture.put(nodes.prefill)
    answer = ask(nodes.decode, prompt, nodes.prefill)
    assert nodes.decode.counter("handoffs") == handoffs + 1
    assert nodes.prefill.counter("images_encoded") == encoded + 1
    assert nodes.decode.counter("images_encoded") == 0
    assert answer.tokens == alone_answer(nodes, prompt, picture)
    ask(nodes.decode, nodes.prompt(40, first=6), nodes.prefill)
    assert nodes.decode.counter("handoffs") == handoffs + 1


def test_prompts_whose_images_are_cached_on_d_stay_there(nodes: Nodes) -> None:
    picture = nodes.picture(value=2)
    prompt = nodes.prompt(20, picture, 20)
    picture.put(nodes.prefill)
    first = ask(nodes.decode, prompt, nodes.prefill)

    def again() -> None:
        answer = ask(nodes.decode, prompt, nodes.prefill)
        assert answer.tokens == first.tokens
        assert answer.cached_tokens == len(prompt[0]) // BLOCK * BLOCK

    assert counted(nodes.decode, "handoffs", again) == 0


def test_an_image_is_encoded_once_for_several_prompts(nodes: Nodes) -> None:
    picture = nodes.picture(value=3)

    def prompts() -> None:
        for first in (7, 8, 9):
            prompt = nodes.prompt(20, picture, 3, picture, 20, first=first)
            picture.put(nodes.prefill)
            ask(nodes.decode, prompt, nodes.prefill)

    hits = nodes.prefill.counter("image_cache_hits")
    assert counted(nodes.prefill, "images_encoded", prompts) == 1
    assert nodes.prefill.counter("image_cache_hits") == hits + 5


@pytest.mark.parametrize("handed_off", [True, False])
def test_images_of_equal_size_under_the_same_text_share_nothing(handed_off: bool, nodes: Nodes) -> None:
    first = nodes.picture(value=10 + 2 * handed_off)
    second = nodes.picture(value=11 + 2 * handed_off)
    computing = nodes.prefill if handed_off else nodes.alone
    answers = []
    for picture in (first, second, first):
        picture.put(computing)
        node = nodes.decode if handed_off else nodes.alone
        prompt = nodes.prompt(2 * BLOCK - 1, picture, 2 * BLOCK, first=20 + handed_off)
        answers.append(ask(node, prompt, nodes.prefill if handed_off else None))
    assert [answer.cached_tokens for answer in answers] == [0, 2 * BLOCK, 4 * BLOCK]
    assert answers[0].tokens == answers[2].tokens != answers[1].tokens


def test_a_pulled_prefix_spares_its_images(nodes: Nodes) -> None:
    first = nodes.picture(value=30)
    second = nodes.picture(value=31)
    prefix = (2 * BLOCK - 1, first, 2 * BLOCK - first.rows * first.columns)
    first.put(nodes.prefill)
    ask(nodes.decode, nodes.prompt(*prefix, 3, first=30), nodes.prefill)
    prompt = nodes.prompt(*prefix, 5, second, 20, first=30)
    for picture in (first, second):
        picture.put(nodes.alone)
    pulled = nodes.alone.counter("pulled_tokens")
    encoded = nodes.alone.counter("images_encoded")
    answer = ask(nodes.alone, prompt, nodes.prefill, pull=True, prefix_tokens=4 * BLOCK)
    assert nodes.alone.counter("pulled_tokens") == pulled + 4 * BLOCK
    assert nodes.alone.counter("images_encoded") == encoded + 1
    for picture in (first, second):
        picture.put(nodes.prefill)
    assert answer.tokens == ask(nodes.decode, prompt, nodes.prefill).tokens


@pytest.mark.parametrize("text", [2, BLOCK], ids=["in the last block", "before the last block"])
def test_choices_go_on_behind_an_image_on_d(text: int, nodes: Nodes) -> None:
    picture = nodes.picture(value=40 + text)
    prompt = nodes.prompt(BLOCK - 1, picture, text)
    expected = alone_answer(nodes, prompt, picture)
    picture.put(nodes.prefill)
    ids, images = prompt
    with RouterClient(nodes.decode.address) as client:
        served = client.generate(ids, greedy(6, n=3), nodes.prefill.address, images=images_to_pb(images))
    assert served.failure is None
    assert served.choices == dict.fromkeys(range(3), expected)


def test_a_prefill_node_that_dies_costs_no_answer(checkpoint_that_sees: Path) -> None:
    """D lacks the pixels, so the router is to send them to another node, with the tokens so far."""
    with Fleet() as fleet:
        nodes = start(fleet, checkpoint_that_sees, SLOW)
        picture = nodes.picture(4, 4, value=50)
        prompt = nodes.prompt(20, picture, 1000)
        picture.put(nodes.prefill)
        ids, images = prompt
        with RouterClient(nodes.decode.address) as client:
            result = client.send(ids, GREEDY, nodes.prefill.address, images=images_to_pb(images))
            fleet.wait_until(lambda: nodes.prefill.status().running == 1, 10.0)
            nodes.prefill.kill()
            failure = result.wait().failure
        assert failure is not None
        assert failure.code == pb.Failure.NEEDS_IMAGES
        assert "this node encodes no images, and has to compute the one at token 21" in failure.message
        nodes.decode.wait_idle()
        answer = alone_answer(nodes, prompt, picture)
        picture.put(nodes.alone)
        resumed = ask(nodes.alone, prompt, resume=[pb.ResumedChoice(choice=0, token_ids=pack_tokens(answer[:2]))])
        assert resumed.tokens == answer[2:]


@pytest.mark.slow
def test_pixels_are_freed_with_the_prompt(nodes: Nodes) -> None:
    picture = nodes.picture(8, 8, value=60)
    picture.put(nodes.prefill)
    ask(nodes.decode, nodes.prompt(20, picture, 20, first=60), nodes.prefill)
    start = time.monotonic()
    name = "pdserve_image_memory_bytes"
    while sum(value for key, value in nodes.prefill.status().counters.items() if key.startswith(name)):
        assert time.monotonic() < start + patience(40.0)
        time.sleep(0.1)
