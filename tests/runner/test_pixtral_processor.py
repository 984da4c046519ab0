"""Sizes, inputs and tokens of Mistral 3's images, against the library; what its files may ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_checkpoints import PIXTRAL, PIXTRAL_TOKENS, random_image, write_processor, write_tokenizer
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from pdserve.errors import CheckpointError, RequestError
from pdserve.image_tokens import embedded_tokens, ids_of_image
from pdserve.images import ImageInput, ImageSpan, largest_image, most_tokens
from pdserve.model.config_fields import ConfigFields
from pdserve.model.image_processor import FILE, NESTED, ImageProcessor, read_image_processor, smart_size, token_count
from pdserve.model.towers.pixtral import PixtralVision
from pdserve.model.vision import read_vision
from runner.models.vision.patches import patches, value_table

TOWER = PixtralVision(
    depth=1, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=14, merge_size=2, out_hidden_size=64,
    activation="gelu", rope_theta=1e4, image_token_id=10, norm_eps=1e-5, projector_activation="gelu",
    has_projector_bias=False,
)  # fmt: skip
#: Height, width and mode of images.
IMAGES = [(64, 64, "RGB"), (33, 97, "RGB"), (500, 41, "RGB"), (1, 150, "L"), (640, 480, "CMYK"), (448, 1, "RGB")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a processor, and of the tokenizer with its tokens."""
    path = Path(tmp_path_factory.mktemp("pixtral"))
    write_tokenizer(path, "mistral3")
    write_processor(path, "mistral3")
    return path


@pytest.fixture
def changed(directory: Path, tmp_path: Path) -> Path:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def processor_of(directory: Path, **fields: Any) -> ImageProcessor:
    (directory / FILE).write_text(json.dumps({**PIXTRAL, **fields}))
    processor = read_image_processor(directory, TOWER)
    assert processor is not None
    return processor


def bounds(side: int) -> ImageInput:
    most = (-(-side // 28) * 28) ** 2
    return ImageInput(10, 14, 2, 784, most, bytes(32), max_side=side, row_end=12, image_end=13)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1540, 1024, 448, 100]))
def test_sizes_are_the_library_s(height: int, width: int, side: int) -> None:
    taken = bounds(side)
    pixels = np.empty((height, width, 3), np.uint8)
    expected = get_resize_output_image_size(pixels, (side, side), (28, 28), "channels_last")
    if not min(expected):
        with pytest.raises(RequestError, match=f"{width} × {height} pixels; one side may be at most {side} times"):
            smart_size(taken, height, width)
        return
    size = smart_size(taken, height, width)
    assert size == tuple(expected)
    assert max(size) <= taken.largest_side
    assert size[0] * size[1] <= taken.max_pixels
    assert token_count(taken, height, width) == size[0] // 28 * (size[1] // 28 + 1)


def test_tokens_of_screenshots() -> None:
    sizes = [(1080, 1920), (512, 512), (3000, 4000)]
    assert [token_count(bounds(1540), *size) for size in sizes] == [1736, 380, 2352]
    assert largest_image(bounds(1540), 1 << 17) == 55 * 55
    assert most_tokens(bounds(1540), 1 << 17) == token_count(bounds(1540), 5000, 5000) == 55 * 56
    assert most_tokens(bounds(1540), 3000) == 3000


@pytest.mark.parametrize("normalization", [{}, {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1}])
@pytest.mark.parametrize(("height", "width", "mode"), IMAGES)
def test_inputs_are_bit_equal_to_the_library_s(
    height: int, width: int, mode: str, normalization: dict[str, Any], changed: Path
) -> None:
    processor = processor_of(changed, **normalization)
    image = random_image(height, width, seed=height, mode=mode)
    (changed / NESTED).unlink()
    library: Any = PixtralImageProcessorPil.from_pretrained(changed)
    expected = library([image], patch_size=28, return_tensors="pt")
    resized_height, resized_width = smart_size(processor.image_input(10), height, width)
    assert torch.as_tensor(expected["image_sizes"]).tolist() == [[resized_height, resized_width]]
    resized = image.convert("RGB").resize((resized_width, resized_height), Image.Resampling.BICUBIC)
    inputs = patches(torch.from_numpy(np.array(resized)), value_table(processor), processor)
    cells = expected["pixel_values"][0].unfold(1, 28, 28).unfold(2, 28, 28)  # [3, rows, columns, 28, 28]
    of_cells = cells.unfold(3, 14, 14).unfold(4, 14, 14)  # [3, rows, columns, 2, 2, 14, 14]
    assert torch.equal(inputs, of_cells.permute(1, 2, 3, 4, 0, 5, 6).reshape(len(inputs), -1))


def test_the_files_that_mistral_publishes(directory: Path, changed: Path) -> None:
    taken = processor_of(changed, size={"longest_edge": 1540}).image_input(10)
    assert (taken.max_side, taken.largest_side, taken.max_pixels, taken.cell) == (1540, 1540, 1540**2, 28)
    texts = [token["content"] for token in json.loads((directory / "tokenizer.json").read_text())["added_tokens"]]
    assert texts.index("[IMG_BREAK]") > 0
    assert {taken.row_end, taken.image_end}.isdisjoint({0, 10})
    assert taken.row_end != taken.image_end


def test_fields_within_the_processor_s_file_count(changed: Path) -> None:
    """transformers 5 writes them there, and sizes of patches as objects."""
    plain = processor_of(changed)
    nested = {**PIXTRAL, "patch_size": {"height": 14, "width": 14}}
    whole = {**PIXTRAL_TOKENS, "image_processor": nested, "patch_size": 14, "spatial_merge_size": 2}
    (changed / NESTED).write_text(json.dumps(whole))
    (changed / FILE).unlink()
    assert read_image_processor(changed, TOWER) == plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_resize": False}, "do_resize = False; supported is True"),
        ({"resample": 2}, "resample = 2; supported is 3"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type 'Qwen2VLImageProcessor'"),
        ({"size": {"longest_edge": 27}}, "sides of at most 27 pixels; it must be a number from 28 to 8192"),
        ({"size": {"longest_edge": 8193}}, "sides of at most 8193 pixels"),
    ],
)
def test_what_a_processor_may_not_ask_for_is_refused_by_name(fields: dict[str, Any], words: str, changed: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        processor_of(changed, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"patch_size": 16}, "patch_size = 16, but the tower in config.json has 14"),
        ({"spatial_merge_size": 1}, "spatial_merge_size = 1, but the tower in config.json has 2"),
        ({"image_break_token": "[NONE]"}, "image_break_token = '.NONE.', which is no token of tokenizer.json"),
    ],
)
def test_files_of_another_model_are_refused_by_name(fields: dict[str, Any], words: str, changed: Path) -> None:
    (changed / NESTED).write_text(json.dumps({**PIXTRAL_TOKENS, **fields}))
    with pytest.raises(CheckpointError, match=words):
        processor_of(changed)


def test_a_checkpoint_without_a_tokenizer_has_no_ends_of_rows(changed: Path) -> None:
    (changed / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, which has the tokens that end rows"):
        processor_of(changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer = -2; supported is -1"),
        ({"vision_config": {"head_dim": 32}}, "head_dim = 32; hidden_size 32 and 2 heads make 16"),
        ({"vision_config": {"num_channels": 1}}, "num_channels = 1; supported is 3"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type 'yarn'; supported are axial"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act 'relu'"),
        ({"image_token_index": 512}, "image_token_index = 512, but a vocabulary of 512 tokens"),
    ],
)
def test_towers_that_are_not_supported_are_refused_by_name(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    vision = {"model_type": "pixtral", "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "patch_size": 14}
    text = {"model_type": "mistral", "hidden_size": 64, "vocab_size": 512}
    config = {"model_type": "mistral3", "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vision(ConfigFields(tmp_path / "config.json")) is not None
    changed = {**change, "vision_config": {**vision, **change.get("vision_config", {})}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(CheckpointError, match=words):
        read_vision(ConfigFields(tmp_path / "config.json"))


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.data())
def test_chunks_have_the_embeddings_of_their_tokens(
    rows: int, columns: int, row_ends: bool, data: st.DataObject
) -> None:
    taken = bounds(448) if row_ends else ImageInput(10, 16, 2, 1024, 1 << 20, bytes(32))
    span = ImageSpan(5, *taken.grid(rows * taken.cell, columns * taken.cell), bytes(32))
    first = data.draw(st.integers(0, span.num_tokens))
    last = data.draw(st.integers(first, span.num_tokens))
    placeholders = ids_of_image(taken, span.rows, span.columns) == 10
    tokens = embedded_tokens(taken, span, first, last)
    assert tokens.tolist() == [token for token in range(first, last) if placeholders[token]]
    embeddings = range(taken.embeddings_before(span, first), taken.embeddings_before(span, last))
    assert len(tokens) == len(embeddings)
    assert embeddings.start == placeholders[:first].sum()
    assert taken.num_embeddings(span) == rows * columns == placeholders.sum()
    assert taken.size(span) == (rows * taken.cell, columns * taken.cell)
