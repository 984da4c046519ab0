"""Sizes of images and the inputs of towers, against the library; what a checkpoint's processor may ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_checkpoints import PROCESSOR, random_image
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from pdserve.errors import CheckpointError, RequestError
from pdserve.images import ImageInput
from pdserve.model.image_processor import FILE, NESTED, ImageProcessor, read_image_processor, smart_size, token_count
from pdserve.model.vision import QwenVision
from runner.models.vision.patches import patches, value_table

TOWER = QwenVision(
    depth=1, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=16, merge_size=2, temporal_patch_size=2,
    num_positions=64, out_hidden_size=64, deepstack=(), activation="gelu_pytorch_tanh", rope_theta=1e4,
    rope_sections=(6, 5, 5), image_token_id=5,
)  # fmt: skip
PUBLISHED = {**PROCESSOR, "size": {"longest_edge": 16777216, "shortest_edge": 65536}}
#: Height, width and mode of images.
IMAGES = [
    (64, 64, "RGB"), (33, 97, "RGB"), (300, 41, "RGB"), (1, 150, "L"), (77, 501, "RGBA"), (199, 200, "P"),
    (640, 480, "CMYK"), (11, 13, "1"),
]  # fmt: skip
SIDES = st.integers(1, 5000)
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def processor_of(directory: Path, **fields: Any) -> ImageProcessor:
    (directory / FILE).write_text(json.dumps({**PROCESSOR, **fields}))
    processor = read_image_processor(directory, TOWER)
    assert processor is not None
    return processor


def bounds(min_pixels: int, max_pixels: int) -> ImageInput:
    return ImageInput(5, 16, 2, min_pixels, max_pixels, bytes(32))


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(65536, 16777216), (4096, 262144), (3136, 1 << 20)])
)
def test_sizes_are_the_library_s(height: int, width: int, pixels: tuple[int, int]) -> None:
    taken = bounds(*pixels)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError, match=f"{width} × {height} pixels.*200 times"):
            smart_size(taken, height, width)
        return
    size = smart_size(taken, height, width)
    assert size == smart_resize(height, width, 32, *pixels)
    assert size[0] * size[1] <= pixels[1]
    assert token_count(taken, height, width) == size[0] * size[1] // 1024


def test_tokens_of_screenshots() -> None:
    taken = bounds(65536, 16777216)
    sizes = [(1080, 1920), (512, 512), (3000, 4000), (2160, 3840)]
    assert [token_count(taken, *size) for size in sizes] == [2040, 256, 11750, 8160]


def test_a_shape_that_no_size_within_the_bounds_has_is_refused() -> None:
    with pytest.raises(RequestError, match="become 4512 × 32; the limit is 102400 pixels"):
        smart_size(bounds(4096, 102_400), 40, 8000)


@pytest.mark.parametrize("normalization", [{}, CLIP, {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1}])
@pytest.mark.parametrize(("height", "width", "mode"), IMAGES)
def test_inputs_are_bit_equal_to_the_library_s(
    height: int, width: int, mode: str, normalization: dict[str, Any], tmp_path: Path
) -> None:
    processor = processor_of(tmp_path, **normalization)
    image = random_image(height, width, seed=height, mode=mode)
    library: Any = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    expected = library([image], return_tensors="pt")
    resized_height, resized_width = smart_size(processor.image_input(5), height, width)
    resized = image.convert("RGB").resize((resized_width, resized_height), Image.Resampling.BICUBIC)
    inputs = patches(torch.from_numpy(np.array(resized)), value_table(processor), processor)
    assert expected["image_grid_thw"].tolist() == [[1, resized_height // 16, resized_width // 16]]
    assert torch.equal(inputs, expected["pixel_values"])


def test_the_file_that_qwen_publishes(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, **PUBLISHED)
    taken = processor.image_input(7)
    assert (taken.min_pixels, taken.max_pixels, taken.cell, taken.token_id) == (65536, 16777216, 32, 7)
    assert processor.mean == processor.std == (0.5, 0.5, 0.5)
    assert processor_of(tmp_path, **PUBLISHED, min_pixels=5000, max_pixels=90000).image_input(7).min_pixels == 5000


def test_fields_within_the_processor_s_file_count(tmp_path: Path) -> None:
    """transformers 5 writes them there; an older file beside it may be another model's."""
    plain = processor_of(tmp_path)
    (tmp_path / NESTED).write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert read_image_processor(tmp_path, TOWER) == plain
    (tmp_path / NESTED).write_text(json.dumps({"image_processor": {**PROCESSOR, **CLIP}}))
    (tmp_path / FILE).write_text(json.dumps({**PROCESSOR, "patch_size": 14}))
    nested = read_image_processor(tmp_path, TOWER)
    library: Any = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert nested is not None
    assert nested.mean == tuple(library.image_mean) == tuple(CLIP["image_mean"])
    (tmp_path / FILE).unlink()
    assert read_image_processor(tmp_path, TOWER) == nested
    (tmp_path / NESTED).write_text(json.dumps({"image_processor": {**PROCESSOR, "resample": 2}}))
    with pytest.raises(CheckpointError, match=r"processor_config.json image_processor has resample = 2"):
        read_image_processor(tmp_path, TOWER)


def test_any_other_field_makes_another_fingerprint(tmp_path: Path) -> None:
    plain = processor_of(tmp_path)
    others: list[dict[str, Any]] = [
        {"image_mean": [0.5, 0.5, 0.51]}, {"image_std": 0.4}, {"rescale_factor": 0.004}, {"max_pixels": 100_000},
        {"min_pixels": 5000},
    ]  # fmt: skip
    prints = {plain.fingerprint, *(processor_of(tmp_path, **other).fingerprint for other in others)}
    assert len(prints) == 1 + len(others)
    assert processor_of(tmp_path, resample=3, transformers_version="5").fingerprint == plain.fingerprint
    assert len(plain.fingerprint) == 32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_resize": False}, "do_resize = False; supported is True"),
        ({"do_normalize": False}, "do_normalize = False"),
        ({"do_center_crop": True}, "do_center_crop = True; supported is False"),
        ({"resample": 2}, "resample = 2; supported is 3"),
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type 'SiglipImageProcessor'"),
        ({"patch_size": 14}, "patch_size = 14, but the tower in config.json has 16"),
        ({"size": {"shortest_edge": 4096, "longest_edge": 1 << 27}}, "size has longest_edge = 134217728"),
        ({"size": 224}, "has size = 224; it must be an object"),
        ({"max_pixels": 4095}, "at least 4096 and at most 4095 pixels"),
        ({"min_pixels": 0}, "min_pixels = 0; it must be a whole number from 1"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std = 0.0"),
        ({"image_mean": [0.5, 0.5]}, "image_mean = .0.5, 0.5.; it must have 3 numbers"),
    ],
)
def test_what_a_processor_may_not_ask_for_is_refused_by_name(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        processor_of(tmp_path, **fields)


def test_a_checkpoint_without_the_file_has_no_processor(tmp_path: Path) -> None:
    assert read_image_processor(tmp_path, TOWER) is None
