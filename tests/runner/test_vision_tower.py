"""Vision towers compute what the library's do, and take only a checkpoint's own tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from image_checkpoints import KINDS, SLOW, ImageReference, encode, make_image_checkpoint, random_image
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.errors import CheckpointError
from pdserve.model.config_fields import ConfigFields
from pdserve.model.image_processor import read_image_processor, smart_size
from pdserve.model.model_config import load_model_config
from pdserve.model.vision import AnyVision, read_vision
from runner.loading.tower_weights import fill_tower, load_tower
from runner.models.vision.towers import AnyVisionTower, make_tower
from runner.placement import TensorPlacement

CPU = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)
#: Heights and widths of the images of a prompt; merged grids from 1 × 8 to 16 × 16, also of odd sides.
PROMPTS = [
    [(96, 96)],
    [(33, 250), (250, 33)],
    [(70, 100), (160, 96), (70, 100)],
    [(512, 512), (64, 64), (32, 128), (351, 223)],
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW and kind != "gemma4")) for kind in KINDS],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / request.param, request.param)


@pytest.fixture(scope="module")
def qwen(checkpoint: Path) -> Path:
    """A checkpoint whose tower has the fields and tensors of Qwen's."""
    if not checkpoint.name.startswith("qwen"):
        pytest.skip("other towers have other names")
    return checkpoint


def vision_of(checkpoint: Path) -> AnyVision:
    vision = load_model_config(checkpoint).vision
    assert vision is not None
    return vision


def empty_tower(checkpoint: Path) -> AnyVisionTower:
    processor = read_image_processor(checkpoint, vision_of(checkpoint))
    assert processor is not None
    return make_tower(vision_of(checkpoint), processor, CPU)


def resized(checkpoint: Path, image: Image.Image) -> Tensor:
    """Return the pixels that a router sends: uint8 [height, width, 3]."""
    processor = read_image_processor(checkpoint, vision_of(checkpoint))
    assert processor is not None
    height, width = smart_size(processor.image_input(0), image.height, image.width)
    return torch.from_numpy(np.array(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)))


def test_features_are_the_library_s(checkpoint: Path) -> None:
    tower = empty_tower(checkpoint)
    load_tower(tower, checkpoint)
    reference = ImageReference(checkpoint)
    for number, sizes in enumerate(PROMPTS):
        images = [random_image(height, width, seed=10 * number + at) for at, (height, width) in enumerate(sizes)]
        embeddings, joined = reference.features(images)
        features = [encode(tower, resized(checkpoint, image)) for image in images]
        torch.testing.assert_close(
            torch.cat([feature.embeddings for feature in features]), embeddings, rtol=1e-5, atol=4e-5
        )
        deepstack = torch.cat([feature.deepstack for feature in features], dim=1)
        assert len(deepstack) == len(tower.config.deepstack) == len(joined)
        for layer, rows in enumerate(deepstack):
            torch.testing.assert_close(rows, joined[layer], rtol=1e-5, atol=1e-5)


def test_unlike_images_of_one_size_have_unlike_features(checkpoint: Path) -> None:
    tower = empty_tower(checkpoint)
    load_tower(tower, checkpoint)
    one, other = (encode(tower, resized(checkpoint, random_image(96, 64, seed))).embeddings for seed in (1, 2))
    assert (one - other).abs().max() > 0.1


def test_names_of_the_first_releases_are_read(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    parts = vision_of(checkpoint).tensors
    first = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    first = {name: tensor for name, tensor in first.items() if name.startswith(parts)}
    save_file(first, tmp_path / "model.safetensors")
    towers = empty_tower(checkpoint), empty_tower(checkpoint)
    for tower, directory in zip(towers, (checkpoint, tmp_path), strict=True):
        load_tower(tower, directory)
    one, other = (dict(tower.named_parameters()) for tower in towers)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.visual.merger.linear_fc1.bias": None}, "lacks the tensors model.visual.merger.linear_fc1.bias"),
        ({"model.visual.pos_embed.weight": torch.ones(49, 32)}, r"pos_embed.weight has shape \(49, 32\).*\(64, 32\)"),
        ({"model.visual.blocks.4.norm1.bias": torch.ones(32)}, "blocks.4.norm1.bias has no place in the model"),
        ({"model.visual.merger.norm.bias": torch.ones(32, dtype=torch.int8)}, "norm.bias has dtype I8"),
    ],
)
def test_tensors_of_another_tower_are_refused_by_name(
    change: dict[str, Any], words: str, qwen: Path, tmp_path: Path
) -> None:
    tensors = {**load_file(qwen / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_tower(empty_tower(qwen), tmp_path)


def test_random_weights_depend_on_names_and_shapes_only(checkpoint: Path) -> None:
    towers = empty_tower(checkpoint), empty_tower(checkpoint)
    for tower in towers:
        fill_tower(tower)
    pixels = resized(checkpoint, random_image(64, 96, seed=0))
    one, other = (encode(tower, pixels).embeddings for tower in towers)
    assert torch.equal(one, other)
    assert one.isfinite().all()


def test_weights_are_counted(checkpoint: Path) -> None:
    parameters = empty_tower(checkpoint).parameters()
    assert vision_of(checkpoint).num_weights == sum(parameter.numel() for parameter in parameters)


def test_towers_in_sixteen_bits_compute_in_them(checkpoint: Path) -> None:
    processor = read_image_processor(checkpoint, vision_of(checkpoint))
    assert processor is not None
    wide = empty_tower(checkpoint)
    narrow = make_tower(vision_of(checkpoint), processor, placement_of(torch.bfloat16))
    for tower in (wide, narrow):
        load_tower(tower, checkpoint)
    pixels = resized(checkpoint, random_image(64, 96, seed=0))
    exact, rounded = (encode(tower, pixels).embeddings for tower in (wide, narrow))
    assert rounded.dtype == torch.bfloat16
    assert (exact - rounded.float()).norm() < 0.05 * exact.norm()


def placement_of(dtype: torch.dtype) -> TensorPlacement:
    return TensorPlacement(CPU.device, dtype, dtype)


#: Changes of config.json that no tower here can follow, and words of the error.
UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"vision_config": {"hidden_size": 36, "num_heads": 2}}, "vision_config has hidden_size 36 and 2 heads"),
    ({"vision_config": {"num_position_embeddings": 60}}, "num_position_embeddings = 60; it must be the square"),
    ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size = 32, but text_config has 64"),
    ({"vision_config": {"hidden_act": "relu"}}, "hidden_act 'relu'; supported are gelu_pytorch_tanh"),
    ({"vision_config": {"depth": 0}}, "depth = 0; it must be a whole number from 1"),
    ({"vision_config": {"in_channels": 1}}, "in_channels = 1; supported is 3"),
    ({"image_token_id": 512}, "image_token_id = 512, but a vocabulary of 512 tokens"),
]


@pytest.mark.parametrize(("change", "words"), UNUSABLE)
def test_towers_that_are_not_supported_are_refused_by_name(
    change: dict[str, Any], words: str, qwen: Path, tmp_path: Path
) -> None:
    _write_config(qwen, tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        read_vision(ConfigFields(tmp_path / "config.json"))


@pytest.mark.parametrize("change", [change for change, _ in UNUSABLE])
def test_text_model_beside_an_unusable_tower_loads(change: dict[str, Any], qwen: Path, tmp_path: Path) -> None:
    _write_config(qwen, tmp_path, {})
    usable = load_model_config(tmp_path)
    assert usable.vision is not None
    _write_config(qwen, tmp_path, change)
    assert load_model_config(tmp_path) == msgspec.structs.replace(usable, vision=None)


def test_image_token_must_be_in_a_vocabulary_that_the_file_leaves_out(tmp_path: Path) -> None:
    """The library's class has 151,936 tokens."""
    checkpoint = make_image_checkpoint(tmp_path / "whole", "qwen3_vl")
    config = msgspec.json.decode((checkpoint / "config.json").read_bytes())
    del config["text_config"]["vocab_size"]
    (checkpoint / "config.json").write_bytes(msgspec.json.encode(config))
    _write_config(checkpoint, tmp_path, {"image_token_id": 151935})
    assert read_vision(ConfigFields(tmp_path / "config.json")) is not None
    _write_config(checkpoint, tmp_path, {"image_token_id": 151936})
    with pytest.raises(CheckpointError, match="a vocabulary of 151936 tokens"):
        read_vision(ConfigFields(tmp_path / "config.json"))


@pytest.mark.parametrize(("layers", "words"), [
    ([0, 1, 2, 3], "has 4 deepstack_visual_indexes; the text model has 4 layers"),
    ([2, 1], r"\[2, 1\]; it must be a list of layers in ascending order"),
    ([1, 4], r"\(1, 4\); the depth is 4"),
])  # fmt: skip
def test_deepstack_layers_must_exist(layers: list[int], words: str, tmp_path: Path) -> None:
    checkpoint = make_image_checkpoint(tmp_path / "whole", "qwen3_vl")
    _write_config(checkpoint, tmp_path, {"vision_config": {"deepstack_visual_indexes": layers}})
    with pytest.raises(CheckpointError, match=words):
        read_vision(ConfigFields(tmp_path / "config.json"))


def _write_config(checkpoint: Path, target: Path, change: dict[str, Any]) -> None:
    """Write the checkpoint's config.json with other fields; of objects only those in ``change`` differ."""
    config = msgspec.json.decode((checkpoint / "config.json").read_bytes())
    for name, value in change.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (target / "config.json").write_bytes(msgspec.json.encode(config))
