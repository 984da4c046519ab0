"""Runners encode the images of plans: prompts in chunks of any size have the library's tokens and log-probabilities.

python -m pytest -m slow tests/runner/test_image_encoding.py     V2, in Triton's interpreter on CPUs
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gemma_images
import msgspec
import numpy as np
import pytest
import torch
from checkpoints import node_config
from drafted_node import DraftedNode, Oracle
from image_checkpoints import DEEPSTACK, KINDS, SLOW, ImageReference, add_predictor, make_image_checkpoint, random_image
from PIL import Image
from ranks import Case, answers_of_ranks
from safetensors.torch import load_file, save_file
from stepper import Stepper, copy_to

import runner
from pdserve.errors import CheckpointError
from pdserve.images import EncodedImage, ImageMode, Images, image_digest
from pdserve.ipc.messages import PutPixels
from pdserve.model.image_processor import smart_size
from pdserve.protocols import ModelRunner
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange
from runner.image_encoding import ImageEncoding
from runner.warmup import run_largest_steps

NUM_TOKENS = 5
SCORED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, prompt_logprobs=0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Prompt(msgspec.Struct):
    """A conversation, the library's tokens after it, and the log-probabilities of all tokens but the first."""

    ids: list[int]
    spans: Images
    pixels: list[EncodedImage]
    tokens: list[int]
    logprobs: torch.Tensor


class Library:
    """The library's model of a checkpoint, and prompts for ours."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.reference = ImageReference(checkpoint)
        accepted = node_config(checkpoint, images="on").image_input
        assert accepted is not None
        self.accepted = accepted

    def encoded(self, image: Image.Image) -> EncodedImage:
        """Return the image as a router sends it."""
        height, width = smart_size(self.accepted, image.height, image.width)
        pixels = np.array(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)).tobytes()
        return EncodedImage(image_digest(self.accepted.fingerprint, height, width, pixels), height, width, pixels)

    def prompt(self, *parts: str | Image.Image) -> Prompt:
        images = [part for part in parts if not isinstance(part, str)]
        pixels = [self.encoded(image) for image in images]
        ids, spans = self.reference.prompt(*parts)
        spans = tuple(
            msgspec.structs.replace(span, digest=image.digest) for span, image in zip(spans, pixels, strict=True)
        )
        tokens = self.reference.greedy(ids, images, NUM_TOKENS)
        logprobs = self.reference.logits([*ids, *tokens], images).log_softmax(dim=-1)[:-1]
        logprobs = logprobs.gather(1, torch.tensor([*ids, *tokens])[1:, None])[:, 0]
        return Prompt(ids, spans, pixels, tokens, logprobs)

    def conversation(self, number: int) -> Prompt:
        """Return a random conversation with up to four images of random sizes."""
        numbers = random.Random(number)
        parts: list[str | Image.Image] = []
        for index in range(numbers.randrange(5)):
            parts += ["x" * numbers.randrange(12), random_image(*_size(numbers), seed=10 * number + index)]
        return self.prompt(*parts, "so " * numbers.randrange(1, 6))


def make_checkpoint(path: Path, kind: str, seed: int = 2) -> Path:
    """Write a checkpoint that two stages can share. It samples no placeholder: the library takes all for images'."""
    text: dict[str, Any] = {"num_hidden_layers": 5} if kind in DEEPSTACK else {}
    make_image_checkpoint(path, kind, seed=seed, **text)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][ImageReference(path).image_token_id] = 0.0
    save_file(tensors, path / "model.safetensors")
    return path


def _size(numbers: random.Random) -> tuple[int, int]:
    return numbers.choice(((64, 64), (96, 160), (33, 250), (250, 33), (128, 70)))


def build(
    checkpoint: Path, version: str = "V1", graphs: bool = False, max_drafts: int = 0, **options: Any
) -> ModelRunner:
    backend, device = ("triton", DEVICE) if version == "V2" else ("torch", "cpu")
    options = {"max_model_len": 600, "num_blocks": 192, "max_num_seqs": 4, "max_batch_tokens": 1400, **options}
    config = node_config(
        checkpoint, runner=version, attention_backend=backend, device=device, **{"images": "on", **options}
    )
    cache = max(config.image_cache, 1200 * config.image_token_bytes)  # a stepper drops no embeddings for others
    config = msgspec.structs.replace(config, cuda_graphs=graphs, max_drafts=max_drafts, image_cache=cache)
    return runner.build(config, lambda stage, fraction: None)


def stepper_of(built: ModelRunner) -> Stepper:
    """Return a stepper whose chunks end where the runner's model allows."""
    stepper = Stepper(built)
    stepper.whole_images = built._model.shard.whole_images  # type: ignore[attr-defined]
    return stepper


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(make_checkpoint(tmp_path_factory.mktemp("encoding") / request.param, request.param))


@pytest.fixture(scope="module")
def stepper(library: Library) -> Iterator[Stepper]:
    built = build(library.checkpoint)
    yield stepper_of(built)
    built.close()


def run(stepper: Stepper, prompts: Sequence[Prompt], chunk: int) -> None:
    """Run prompts together, and compare each with the library."""
    seqs = [add(stepper, prompt) for prompt in prompts]
    waiting = set(seqs)
    while waiting:
        stepper.step(chunk)
        for seq in tuple(waiting):
            if len(stepper.live[seq].output) == NUM_TOKENS:
                prompt = prompts[seqs.index(seq)]
                assert stepper.live[seq].output == prompt.tokens
                tables = b"".join(part.table for part in stepper.scored[seq])
                scored = [logprob for logprob, _ in struct.iter_unpack("<fi", tables)]
                samples = [sample.logprobs for sample in stepper.live[seq].samples]
                scored += [logprobs.logprob for logprobs in samples if logprobs is not None]
                torch.testing.assert_close(torch.tensor(scored), prompt.logprobs, rtol=0, atol=3e-4)
                stepper.finish(seq)
                waiting.remove(seq)


def add(stepper: Stepper, prompt: Prompt, sampling: SamplingParams = SCORED) -> int:
    stepper.pixels |= {image.digest: image for image in prompt.pixels}
    return stepper.add(prompt.ids, sampling, images=prompt.spans)


@pytest.mark.parametrize("chunk", [1000, 37, 8])
def test_conversations_are_the_library_s(library: Library, stepper: Stepper, chunk: int) -> None:
    for first in range(0, 8, 4):
        run(stepper, [library.conversation(number) for number in range(first, first + 4)], chunk)


def test_steps_of_a_token_are_the_library_s(library: Library, stepper: Stepper) -> None:
    """In some, all tokens of images are text that ends a row."""
    run(stepper, [library.prompt("see ", random_image(70, 64, seed=6), "!")], 1)


def test_an_image_of_two_prompts_is_encoded_once(library: Library, stepper: Stepper) -> None:
    image = random_image(96, 96, seed=1)
    other = random_image(96, 96, seed=2)
    prompts = [
        library.prompt("a", image, "b", other),
        library.prompt("a longer beginning", image),
        library.prompt("some text"),
    ]
    stepper.encoded.clear()
    run(stepper, prompts, 6)
    assert sorted(stepper.encoded) == sorted(image.digest for image in prompts[0].pixels)
    run(stepper, prompts[:1], 1000)
    assert len(stepper.encoded) == 4  # no prompt needed them in between


def pieces_of(image: EncodedImage, depth: int, *lasts: int) -> list[EncodedImage]:
    """Return the pieces of an image that end behind these blocks."""
    return [
        msgspec.structs.replace(image, first=first, last=last, depth=depth, pixels=b"" if first else image.pixels)
        for first, last in itertools.pairwise((0, *lasts, depth))
    ]


def scores(stepper: Stepper, prompt: Prompt) -> tuple[bytes, list[int]]:
    """Run a prompt. Return its log-probabilities as bytes, and its output."""
    seq = add(stepper, prompt)
    while len(stepper.live[seq].output) < NUM_TOKENS:
        stepper.step(9)
    return b"".join(part.table for part in stepper.scored.pop(seq)), stepper.finish(seq).output


def check_pieces(library: Library, stepper: Stepper) -> None:
    """Pieces run beside decodes and alone, with a whole image between them; the results are equal bit by bit."""
    prompt = library.prompt("see ", random_image(160, 96, seed=3), "!")
    (image,) = prompt.pixels
    other = library.prompt(random_image(64, 64, seed=5), "?")
    depth = stepper.runner._model.tower.config.depth  # type: ignore[attr-defined]
    expected = scores(stepper, prompt)
    assert expected[1] == prompt.tokens
    stepper.step()  # drops the embeddings
    for lasts in ((1, 3), (2,), tuple(range(1, depth))):
        beside = stepper.add([1, 2, 3])
        first, second, *rest = pieces_of(image, depth, *lasts)
        stepper.step(pieces=[first])
        assert scores(stepper, other)[1] == other.tokens
        stepper.finish(beside)
        stepper.step(pieces=[second])
        for piece in rest:
            stepper.step(pieces=[piece])
        assert scores(stepper, prompt) == expected
        stepper.step()


def test_pieces_of_an_image_have_its_results_bit_by_bit(library: Library, stepper: Stepper) -> None:
    check_pieces(library, stepper)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pieces_of_an_image_in_v2(library: Library) -> None:
    built = build(library.checkpoint, "V2")
    check_pieces(library, stepper_of(built))
    built.close()


def test_a_partial_image_is_dropped(library: Library, stepper: Stepper) -> None:
    """Its rows are free again, and another image may be partial; the image may begin again."""
    prompt = library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(160, 96, seed=4), "!")
    image, other = prompt.pixels
    config = stepper.runner._model.tower.config  # type: ignore[attr-defined]
    depth = config.depth
    tokens = image.height * image.width // (config.patch_size * config.merge_size) ** 2
    (feature,) = (f for f in stepper.runner._features if isinstance(f, ImageEncoding))  # type: ignore[attr-defined]
    stepper.step()
    free = feature._embeddings.num_free
    stepper.step(pieces=pieces_of(image, depth, 2)[:1])
    assert feature._embeddings.num_free == free - tokens
    stepper.step(pieces=pieces_of(other, depth, 2)[:1], dropped=(image.digest,))
    stepper.step(dropped=(other.digest,))
    assert feature._embeddings.num_free == free
    stepper.step(pieces=pieces_of(image, depth, 2)[:1])
    stepper.step(pieces=pieces_of(image, depth, 2)[1:])
    assert scores(stepper, prompt)[1] == prompt.tokens


def test_a_preempted_prompt_goes_on(library: Library, stepper: Stepper) -> None:
    prompt = library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!")
    seq = add(stepper, prompt)
    for steps in (1, 2, 6):
        for _ in range(steps):
            stepper.step(9)
        seq = stepper.preempt(seq)
    while len(stepper.live[seq].output) < NUM_TOKENS:
        stepper.step(9)
    assert stepper.finish(seq).output == prompt.tokens


def test_a_prompt_with_a_computed_prefix_begins_amid_an_image(library: Library, stepper: Stepper) -> None:
    """Its blocks come from another sequence, as a prefix hit's do."""
    if node_config(library.checkpoint).state_layout is not None:
        pytest.skip("recurrent states are snapshots at ends of blocks")
    prompt = library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(96, 128, seed=4), "!")
    stepper.keeps_windows = True
    whole = add(stepper, prompt)
    stepper.step()
    num_groups = stepper.runner.kv_layout.groups.num_groups
    for computed in (16, 32):
        assert any(span.start < computed < span.end for span in prompt.spans)
        seq = add(stepper, prompt)
        running = stepper.live[seq]
        running.computed = computed
        running.blocks = [stepper.free.pop() for _ in range(computed // 16 * num_groups)]
        cache = stepper.runner._cache.tensor.view(torch.uint8)  # type: ignore[attr-defined]
        cache = cache.view(stepper.runner.kv_layout.num_blocks, -1)
        for to, source in zip(running.blocks, stepper.live[whole].blocks, strict=False):
            cache[to] = cache[source]
        while len(running.output) < NUM_TOKENS:
            stepper.step(1000)
        assert stepper.finish(seq).output == prompt.tokens
    stepper.finish(whole)
    stepper.keeps_windows = False


def test_a_node_with_positions_only_continues_a_prompt(library: Library, stepper: Stepper) -> None:
    if node_config(library.checkpoint).state_layout is not None:
        pytest.skip("the harness copies no recurrent states")
    prompt = library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!")
    config = node_config(library.checkpoint, images="auto", encodes=False, max_model_len=600)
    assert config.images is ImageMode.POSITIONS
    assert config.image_cache == 0
    built = runner.build(msgspec.structs.replace(config, kv_layout=stepper.runner.kv_layout), lambda *_: None)
    decoding = stepper_of(built)
    seq = add(stepper, prompt)
    stepper.step()
    continued = copy_to(decoding, stepper, seq)
    stepper.finish(seq)
    while len(decoding.live[continued].output) < NUM_TOKENS:
        decoding.step()
    assert decoding.finish(continued).output == prompt.tokens
    add(decoding, prompt)
    with pytest.raises(AssertionError, match=f"image {prompt.spans[0].digest.hex()}, which is not encoded"):
        decoding.step()
    built.close()


def test_a_reloaded_tower_is_that_of_the_checkpoint(library: Library, tmp_path: Path) -> None:
    other = Library(make_checkpoint(tmp_path / "other", library.checkpoint.name, seed=5))
    built = build(library.checkpoint)
    parts: list[str | Image.Image] = ["see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!"]
    before = library.prompt(*parts)
    stepper = stepper_of(built)
    run(stepper, [before], 1000)
    tensors = load_file(other.checkpoint / "model.safetensors")
    lacking = tmp_path / "lacking"
    shutil.copytree(other.checkpoint, lacking)
    names = {"mistral3": "model.multi_modal_projector.linear_2.weight"}
    names |= dict.fromkeys(gemma_images.CLASSES, "model.embed_vision.embedding_projection.weight")
    name = names.get(library.checkpoint.name, "model.visual.merger.linear_fc2.bias")
    del tensors[name]
    save_file(tensors, lacking / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks the tensors {name}"):
        built.change_weights(WeightChange(model_dir=str(lacking)))
    run(stepper, [before], 1000)
    built.change_weights(WeightChange(model_dir=str(other.checkpoint)))
    after = other.prompt(*parts)
    assert after.tokens != before.tokens
    run(stepper_of(built), [after], 1000)
    built.close()


def test_random_towers_encode(library: Library) -> None:
    built = build(library.checkpoint, load_format="dummy")
    stepper = stepper_of(built)
    prompt = library.prompt("see ", random_image(64, 64, seed=4), "!")
    seq = add(stepper, prompt)
    stepper.step()
    assert all(math.isfinite(logprob) for logprob, _ in struct.iter_unpack("<fi", stepper.scored[seq][0].table))
    built.close()


def test_warming_up_leaves_no_image(library: Library) -> None:
    """The largest image has more tokens than a step, and takes half of the cache."""
    config = node_config(library.checkpoint, images="on", max_batch_tokens=128, max_num_seqs=4)
    built = runner.build(config, lambda stage, fraction: None)
    for _ in range(3):
        run_largest_steps(built, config)
        assert not built._model.images.offsets.any()  # type: ignore[attr-defined]
    prompt = library.prompt("see ", random_image(250, 250, seed=4), "!")
    run(stepper_of(built), [prompt], 100)
    built.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_ranks_have_the_library_s_tokens(library: Library, version: str) -> None:
    """Shards encode the same images, and the first one embeds them. Later stages have their positions."""
    prompts = [
        library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!"),
        library.prompt("plain text"),
        library.prompt(random_image(64, 64, seed=5), "?"),
    ]
    options: dict[str, Any] = {"images": "on", "max_num_seqs": 4, "max_batch_tokens": 256, "max_model_len": 300}
    options |= {"attention_backend": {"V1": "torch", "V2": "triton"}[version], "runner": version}
    # Deepstack joins three layers of the first stage, and recurrent models need both kinds of layers in each.
    stage_layers = (4, 1) if library.checkpoint.name in DEEPSTACK else (2, 2)
    splits: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2, "stage_layers": stage_layers}]
    cases = [
        Case(
            config=node_config(library.checkpoint, **options, **split),
            prompts=tuple(tuple(prompt.ids) for prompt in prompts),
            samplings=(msgspec.structs.replace(SCORED, prompt_logprobs=-1),),
            num_tokens=NUM_TOKENS,
            chunk=11,
            images=tuple(prompt.spans for prompt in prompts),
            pixels=tuple(image for prompt in prompts for image in prompt.pixels),
        )
        for split in splits
    ]
    for answers in answers_of_ranks(cases, 2):
        assert [list(outcome.tokens) for outcome in answers[-1].outcomes] == [prompt.tokens for prompt in prompts]


def check_scheduled(library: Library, number: int, drafts: int, graphs: bool = False, **options: Any) -> None:
    """Run conversations twice at once, on few blocks and with room for few images, so that both are dropped."""
    tokens = 48
    if library.reference.gemma is not None:  # each image has 60 to 70 tokens, which a step may have to compute together
        tokens = 150
        options |= {"num_blocks": 64, "max_batch_tokens": 84}
    config = node_config(library.checkpoint, images="on", max_num_seqs=4, max_model_len=400, **options)
    cache = tokens * config.image_token_bytes
    config = msgspec.structs.replace(config, image_cache=cache, cuda_graphs=graphs)
    prompts = [library.conversation(index) for index in range(number)] * 2
    texts = [[*prompt.ids, *prompt.tokens] for prompt in prompts]
    source = partial(Oracle, texts, 0.2, config.model.vocab_size)
    node = DraftedNode(config, drafts, source if drafts else None)
    pixels = {image.digest: image.pixels for prompt in prompts for image in prompt.pixels}
    for digest, data in pixels.items():
        node.scheduler.images.take(PutPixels(digest, data, last=True))
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        node.submit(rid, prompt.ids, sampling, images=prompt.spans)
        node.step()
    answers = node.run()
    assert [answers[rid, 0].token_ids for rid in range(len(prompts))] == [prompt.tokens for prompt in prompts]
    assert sum(len(plan.images) for plan in node.plans) >= len(pixels)
    assert node.num_accepted > 0 or not drafts
    node.close()


@pytest.mark.parametrize("drafts", [0, 2])
def test_scheduled_conversations_are_the_library_s(library: Library, drafts: int) -> None:
    check_scheduled(library, 8, drafts, num_blocks=24, max_batch_tokens=40, state_slots=12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("drafts", [0, 2])
def test_scheduled_conversations_on_v2_are_the_library_s(library: Library, drafts: int) -> None:
    """A step is launched while another one is in flight."""
    options: dict[str, Any] = {"runner": "V2", "attention_backend": "triton", "device": DEVICE}
    check_scheduled(library, 4, drafts, graphs=True, num_blocks=24, max_batch_tokens=40, state_slots=12, **options)


def check_drafts(library: Library, stepper: Stepper) -> None:
    """Right drafts behind images are accepted, wrong ones change nothing."""
    prompt = library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!")
    seq = add(stepper, prompt)
    stepper.step()
    right = prompt.tokens
    stepper.decode(seq, (right[1], right[2]))
    assert stepper.live[seq].output == right[:4]
    stepper.decode(seq, ((right[4] + 1) % 500, 7))
    assert stepper.finish(seq).output == right


def test_right_drafts_behind_images_are_accepted(library: Library) -> None:
    built = build(library.checkpoint, max_drafts=2)
    check_drafts(library, stepper_of(built))
    built.close()


def made_drafts(library: Library, built: ModelRunner) -> list[tuple[int, ...]]:
    """Return the drafts of the model's own layer behind each step of a prompt; the tokens are the library's."""
    prompt = library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!")
    stepper = stepper_of(built)
    seq = add(stepper, prompt)
    for _ in range(3):
        stepper.step(20)
    made: list[tuple[int, ...]] = []
    while len(stepper.live[seq].output) < NUM_TOKENS:
        made.append(stepper.decode(seq, made[-1] if made else (), drafts_ahead=2))
    assert stepper.finish(seq).output[:NUM_TOKENS] == prompt.tokens
    built.close()
    return made


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Library:
    checkpoint = make_image_checkpoint(tmp_path_factory.mktemp("drafting") / "model", "qwen3_5")
    add_predictor(checkpoint)
    return Library(checkpoint)


def test_the_model_s_own_drafts_change_no_token(drafting: Library) -> None:
    made = made_drafts(drafting, build(drafting.checkpoint, draft_layers=1, max_drafts=2))
    assert all(len(drafts) == 2 for drafts in made)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("graphs", [False, True])
def test_v2_drafts_behind_images_as_v1(drafting: Library, graphs: bool) -> None:
    options: dict[str, Any] = {"max_drafts": 2, "max_num_seqs": 2, "num_blocks": 48, "max_batch_tokens": 64}
    v2 = build(drafting.checkpoint, "V2", graphs, draft_layers=1, **options)
    assert made_drafts(drafting, v2) == made_drafts(drafting, build(drafting.checkpoint, draft_layers=1, **options))
    v2 = build(drafting.checkpoint, "V2", graphs, **options)
    check_drafts(drafting, Stepper(v2))
    v2.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("graphs", [False, True])
def test_v2_has_the_library_s_tokens(library: Library, graphs: bool) -> None:
    """Also with the padding of graphs, for steps of decodes beside a text prompt."""
    built = build(library.checkpoint, "V2", graphs, max_num_seqs=3, num_blocks=48, max_batch_tokens=256)
    prompts = [
        library.prompt("see ", random_image(160, 96, seed=3), " and ", random_image(64, 64, seed=4), "!"),
        library.prompt("plain text"),
        library.prompt(random_image(64, 64, seed=5), "?"),
    ]
    stepper = stepper_of(built)
    for chunk in (1000, 11):
        run(stepper, prompts, chunk)
    run(stepper, prompts[1:2], 1000)  # offsets of images are gone
    built.close()
