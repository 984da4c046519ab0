"""Prompts with images: a native decoder has the log-probabilities and tokens of the library, in chunks of any size."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import CONFIG_CLASSES, node_config
from hypothesis import given, settings
from hypothesis import strategies as st
from image_checkpoints import KINDS, ImageReference, encode, make_image_checkpoint, random_image
from PIL import Image
from stepper import Stepper
from test_image_positions import PARTS, laid_out
from test_image_processor import TOWER
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import runner
from pdserve.image_positions import rope_delta, rope_offsets
from pdserve.images import Images
from pdserve.model.image_processor import read_image_processor, smart_size
from pdserve.model.rope import RopeConfig
from pdserve.sampling_params import SamplingParams
from runner.loading.tower_weights import load_tower
from runner.models.decoder import Decoder
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.vision.inputs import ImageInputs
from runner.models.vision.tower import Features
from runner.models.vision.towers import make_tower
from runner.placement import TensorPlacement

NUM_TOKENS = 5
CPU = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)
SCORED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, prompt_logprobs=0)
VISION = msgspec.structs.replace(TOWER, deepstack=(0,))


def _rope(rotary_dim: int, sections: tuple[int, int, int]) -> tuple[Any, RopeConfig, tuple[int, int, int]]:
    """Return the library's embedding of heads of 32 values, and what ours is made of."""
    parameters = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections)}
    if not rotary_dim:
        config = Qwen3VLTextConfig(hidden_size=64, head_dim=32, rope_parameters=parameters)
        return Qwen3VLTextRotaryEmbedding(config), RopeConfig(theta=5e6), sections
    parameters["partial_rotary_factor"] = rotary_dim / 32
    config = Qwen3_5TextConfig(hidden_size=64, head_dim=32, rope_parameters=parameters)
    return Qwen3_5TextRotaryEmbedding(config), RopeConfig(theta=5e6, rotary_dim=rotary_dim), sections


#: Kinds with another text model.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Ministral 3": (
        "mistral3",
        {  # with this seed, no answer has the token of images
            "model_type": "ministral3",
            "rope_parameters": CONFIG_CLASSES["ministral3"][2]["rope_parameters"],
            "seed": 1,
        },
    ),
    "Mistral Small 4": (
        "mistral3",
        {**CONFIG_CLASSES["mistral4"][2], "head_dim": 40, "model_type": "mistral4", "seed": 1},
    ),
}
ROPES = {"whole heads": _rope(0, (6, 5, 5)), "half of a head": _rope(16, (3, 3, 2)), "long time": _rope(0, (10, 4, 2))}


class Seeing:
    """One prompt at a time on V1, whose decoder gets the images of each step."""

    def __init__(self, checkpoint: Path) -> None:
        config = node_config(checkpoint, max_model_len=600, num_blocks=48)
        vision = config.model.vision
        assert vision is not None
        self.processor = read_image_processor(checkpoint, vision)
        assert self.processor is not None
        self.tower = make_tower(vision, self.processor, CPU)
        load_tower(self.tower, checkpoint)
        self.runner = runner.build(config, lambda stage, fraction: None)
        self.stepper = Stepper(self.runner)
        self.inputs = ImageInputs(vision, config.max_batch_tokens, CPU)
        decoder: Decoder = self.runner._model.decoder  # type: ignore[attr-defined]
        decoder.images = self.inputs
        self.reference = ImageReference(checkpoint)
        self.has_axes = not self.reference.is_pixtral  # its positions are indices

    def encode(self, image: Image.Image) -> Features:
        assert self.processor is not None
        height, width = smart_size(self.processor.image_input(0), image.height, image.width)
        pixels = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        return encode(self.tower, torch.from_numpy(np.array(pixels)))

    def run(self, ids: list[int], spans: Images, images: Sequence[Image.Image], chunk: int) -> tuple[list[int], Tensor]:
        """Return the tokens after a prompt, and the log-probabilities of all tokens but the first."""
        features = [self.encode(image) for image in images]
        stepper = self.stepper
        sequence = stepper.live[stepper.add(ids, SCORED)]
        while len(sequence.output) < NUM_TOKENS:
            start = sequence.computed
            end = min(start + chunk, len(sequence.tokens))
            if spans and start < len(ids):
                self._begin(ids, spans, features, range(start, end))
            elif self.has_axes:
                self.inputs.offsets[0] = rope_delta(spans)
            stepper.step(chunk)
            self.inputs.end()
            self.inputs.offsets.zero_()
        (seq,) = stepper.live
        tables = b"".join(part.table for part in stepper.scored[seq])
        prompt = [logprob for logprob, _ in struct.iter_unpack("<fi", tables)]
        sampled = [sample.logprobs.logprob for sample in sequence.samples if sample.logprobs is not None]
        stepper.finish(seq)
        return sequence.output, torch.tensor(prompt + sampled)

    def _begin(self, ids: list[int], spans: Images, features: list[Features], step: range) -> None:
        axes = torch.from_numpy(rope_offsets(spans, step.start, step.stop)) if self.has_axes else None
        rows = []
        values = []
        deepstack = []
        for span, feature in zip(spans, features, strict=True):
            places = [at for at in range(span.start, span.end) if ids[at] == self.reference.image_token_id]
            chosen = torch.tensor([at in step for at in places])
            rows.append(torch.tensor(places)[chosen] - step.start)
            values.append(feature.embeddings[chosen])
            deepstack.append(feature.deepstack[:, chosen])
        self.inputs.begin(axes, torch.cat(rows), torch.cat(values), torch.cat(deepstack, dim=1))


@pytest.fixture(scope="module", params=[*(kind for kind in KINDS if kind.startswith("qwen")), *TEXTS])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, text = TEXTS.get(request.param, (request.param, {}))
    built = Seeing(make_image_checkpoint(tmp_path_factory.mktemp("mrope") / request.param, kind, **text))
    yield built
    built.runner.close()


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ([(96, 96)], (1000, 5)),
        ([(33, 250), (250, 33)], (1000, 7)),
        ([(70, 100), (160, 96), (70, 100)], (16,)),
        ([(250, 250), (64, 64), (32, 128), (200, 90)], (32,)),
    ],
)
def test_a_prompt_with_images_is_the_library_s(
    seeing: Seeing, sizes: list[tuple[int, int]], chunks: tuple[int, ...]
) -> None:
    images = [random_image(*size, seed=seed) for seed, size in enumerate(sizes)]
    parts: list[str | Image.Image] = ["Look: "]
    for image in images:
        parts += [image, " and then "]
    ids, spans = seeing.reference.prompt(*parts)
    tokens = seeing.reference.greedy(ids, images, NUM_TOKENS)
    expected = seeing.reference.logits([*ids, *tokens], images).log_softmax(dim=-1)[:-1]
    expected = expected.gather(1, torch.tensor([*ids, *tokens])[1:, None])[:, 0]
    for chunk in chunks:
        output, logprobs = seeing.run(ids, spans, images, chunk)
        assert output == tokens
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-4)


def test_unlike_images_of_one_size_have_unlike_tokens(seeing: Seeing) -> None:
    outputs = []
    for seed in range(3):
        image = random_image(128, 96, seed)
        ids, spans = seeing.reference.prompt("What is ", image, "?")
        outputs.append(seeing.run(ids, spans, [image], 1000)[0])
        assert outputs[-1] == seeing.reference.greedy(ids, [image], NUM_TOKENS)
    assert len({tuple(output) for output in outputs}) > 1


def test_text_on_a_node_that_takes_images_is_the_library_s(seeing: Seeing) -> None:
    ids, spans = seeing.reference.prompt("The quick brown fox jumps over")
    output, _ = seeing.run(ids, spans, [], 4)
    assert output == seeing.reference.greedy(ids, [], NUM_TOKENS)


@settings(deadline=None)
@given(PARTS, st.integers(1, 12), st.sampled_from(sorted(ROPES)))
def test_every_rotated_pair_takes_the_axis_of_the_library(
    parts: list[tuple[int, int, int]], tail: int, name: str
) -> None:
    spans, length = laid_out(parts, tail)
    positions = torch.from_numpy(np.arange(length) + rope_offsets(spans, 0, length))
    assert (positions <= torch.arange(length)).all()
    assert (positions >= 0).all()
    library, rope, sections = ROPES[name]
    cos, sin = library(torch.zeros(1), positions[:, None])
    rotated = rope.rotary_dim or 32
    mine = RotaryEmbedding(rope, 32, length, CPU.device, sections)(positions, None)
    assert torch.equal(mine.cos[:, : rotated // 2], cos[0, :, : rotated // 2])
    assert torch.equal(mine.sin[:, : rotated // 2], sin[0, :, : rotated // 2])
    assert (mine.cos[:, rotated // 2 :] == 1).all()
    text = RotaryEmbedding(rope, 32, length, CPU.device, sections)
    indices = torch.arange(length)
    assert torch.equal(text(indices, None).cos, text(indices.expand(3, -1), None).cos)


def test_offsets_move_text_behind_an_image() -> None:
    inputs = ImageInputs(VISION, 8, CPU)
    inputs.offsets[2:4] = -5
    assert inputs.positions(torch.tensor([3, 4, 10, 20, 7])).tolist() == [3, 4, 5, 15, 7]
    assert inputs.times(torch.tensor([3, 4, 10])).tolist() == [3, 4, 5]
    assert inputs.times_behind(torch.tensor([12, 8, 3]), torch.tensor([2, 0, 3])).tolist() == [7, 8, 0]
    inputs.begin(torch.tensor([[-1, -2], [0, -1], [-2, 0]]), *_rows())
    assert inputs.has_images
    assert inputs.positions(torch.tensor([8, 9])).tolist() == [[7, 7], [8, 8], [6, 9]]
    inputs.end()
    assert not inputs.has_images
    assert inputs.positions(torch.tensor([8, 9])).tolist() == [8, 9]


def test_rows_of_images_are_forgotten_after_the_step() -> None:
    inputs = ImageInputs(VISION, 8, CPU)
    inputs.begin(None, *_rows())
    assert inputs.embed(torch.zeros(3, 64))[:, 0].tolist() == [0, 7, 0]
    residual = torch.ones(3, 64)
    inputs.after_layer(0, residual)
    inputs.after_layer(1, residual)  # no deepstack layer
    assert residual[:, 0].tolist() == [1, 3, 1]
    inputs.end()
    inputs.after_layer(0, residual)
    assert residual[:, 0].tolist() == [1, 3, 1]
    assert not inputs.embed(torch.zeros(3, 64)).any()


def test_one_shard_of_a_stage_has_the_rows_of_images() -> None:
    both = [ImageInputs(VISION, 8, CPU, shard) for shard in (0, 1)]
    for inputs in both:
        inputs.begin(None, *_rows())
    assert [inputs.embed(torch.ones(3, 64))[:, 0].tolist() for inputs in both] == [[1, 7, 1], [1, 0, 1]]


def _rows() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([1]), torch.full((1, 64), 7.0), torch.full((1, 1, 64), 2.0)
