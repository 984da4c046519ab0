"""Images of Gemma 4: sizes and inputs of towers against the library, masks within images, refusals.

test_image_encoding.py and test_vision_tower.py have its sizes among their kinds, slow ones for the most part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gemma_images
import numpy as np
import pytest
import torch
from checkpoints import node_config
from gemma_images import GemmaProcessor
from hypothesis import given
from hypothesis import strategies as st
from image_checkpoints import make_image_checkpoint, random_image
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from pdserve.config.node_options import NodeOptions
from pdserve.config.resolution.images import with_whole_images
from pdserve.errors import CheckpointError, ConfigError, RequestError
from pdserve.images import ImageInput, ImageMode
from pdserve.model.config_fields import ConfigFields
from pdserve.model.image_processor import FILE, read_image_processor, smart_size, token_count
from pdserve.model.model_config import load_model_config
from pdserve.model.vision import read_vision
from runner.attention.paged_torch import _image_mask
from runner.models.vision.patches import patches, value_table

#: Height, width and mode of images.
IMAGES = [(64, 64, "RGB"), (33, 97, "RGB"), (700, 41, "RGB"), (3, 150, "L"), (640, 480, "CMYK"), (384, 384, "RGB")]


@pytest.fixture(scope="module", params=["gemma4", "gemma4_unified"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("gemma") / request.param, request.param)


def bounds(tokens: int) -> ImageInput:
    return ImageInput(5, 16, 3, 2304, tokens * 2304, bytes(32), before=6, behind=7, fills=True)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([70, 280, 1120]))
def test_sizes_are_the_library_s(height: int, width: int, tokens: int) -> None:
    taken = bounds(tokens)
    try:
        expected = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
    except ValueError:
        with pytest.raises(RequestError, match=f"{width} × {height} pixels"):
            smart_size(taken, height, width)
        return
    assert smart_size(taken, height, width) == expected
    assert max(expected) <= taken.largest_side


def test_tokens_of_screenshots() -> None:
    sizes = [(1080, 1920), (512, 512), (3000, 4000)]
    assert [token_count(bounds(280), *size) for size in sizes] == [264, 256, 266]


@pytest.mark.parametrize(("height", "width", "mode"), IMAGES)
def test_inputs_are_bit_equal_to_the_library_s(height: int, width: int, mode: str, checkpoint: Path) -> None:
    """In the library, the towers of other sizes than the 12B map values of 0 … 1 to -1 … 1."""
    vision = load_model_config(checkpoint).vision
    assert vision is not None
    processor = read_image_processor(checkpoint, vision)
    assert processor is not None
    config = json.loads((checkpoint / "config.json").read_text())
    image = random_image(height, width, seed=height, mode=mode).convert("RGB")
    library = GemmaProcessor(config, json.loads((checkpoint / FILE).read_text()))
    values, places = library.processed([image])
    is_unified = checkpoint.name == "gemma4_unified"
    values = values[0] if is_unified else 2 * (values[0] - 0.5)
    resized_height, resized_width = smart_size(processor.image_input(5), height, width)
    resized = image.resize((resized_width, resized_height), Image.Resampling.BICUBIC)
    inputs = patches(torch.from_numpy(np.array(resized)), value_table(processor), processor)
    side = processor.patch_size
    by_pixel = inputs.view(-1, 3, side * side).transpose(1, 2).flatten(1)
    rows = resized_height // side
    columns = resized_width // side
    merge = processor.merge_size
    order = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
    assert torch.equal(by_pixel, values[order])
    assert places[0][order].tolist() == [[int(at) % columns, int(at) // columns] for at in order]


@given(st.data())
def test_masks_within_images_are_the_library_s(data: st.DataObject) -> None:
    """A token sees the earlier ones and those of its image, of these the ones in its window or behind it."""
    length = data.draw(st.integers(2, 30))
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    window = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    queries = np.arange(length)
    reach = np.where((queries >= start) & (queries < end), end - 1, queries)
    mask = _image_mask(queries, reach, queries, window)[0, 0]
    for query in range(length):
        for key in range(length):
            in_image = start <= query < end and start <= key < end
            sees = (key <= query or in_image) and (window is None or key > query - window)
            assert (mask[query, key] == 0) == sees


def test_only_layers_with_a_window_see_whole_images(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model_config(checkpoint)
    assert model.whole_images
    assert [spec.whole_images for spec in model.attention] == [spec.window is not None for spec in model.attention]
    shared = load_model_config(make_image_checkpoint(tmp_path / "shared", "gemma4_shared"))
    assert not shared.whole_images


def test_a_node_whose_steps_have_no_room_for_an_image_takes_text_only(checkpoint: Path) -> None:
    config = node_config(checkpoint, images="on")
    assert config.image_input is not None
    options = NodeOptions(model=str(checkpoint), images="auto")
    from pdserve.config.resolution.images import ImageSettings

    settings = ImageSettings(mode=ImageMode.TOWER, accepted=config.image_input)
    enough = with_whole_images(settings, options, config.model, 77, 8, 4096).value
    assert enough.mode is ImageMode.TOWER
    refused = with_whole_images(settings, options, config.model, 76, 8, 4096).value
    assert refused.mode is ImageMode.NONE
    assert "max_batch_tokens 76 has no room for an image of 70 tokens" in refused.problem
    on = NodeOptions(model=str(checkpoint), images="on")
    with pytest.raises(ConfigError, match="give at least 77, or leave --images out"):
        with_whole_images(settings, on, config.model, 76, 8, 4096)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_normalize": True}, "do_normalize = True; supported is False"),
        ({"resample": 2}, "resample = 2; supported is 3"),
        ({"max_soft_tokens": 71}, "max_soft_tokens = 71; it must be one of 70, 140, 280, 560, 1120"),
        ({"max_soft_tokens": 1120}, "the tower has positions for"),
        ({"patch_size": 14}, "42 pixels, but the tower in config.json has 48"),
    ],
)
def test_what_a_processor_may_not_ask_for_is_refused_by_name(
    fields: dict[str, Any], words: str, checkpoint: Path, tmp_path: Path
) -> None:
    vision = load_model_config(checkpoint).vision
    assert vision is not None
    (tmp_path / FILE).write_text(json.dumps({**gemma_images.PROCESSOR, **fields}))
    with pytest.raises(CheckpointError, match=words):
        read_image_processor(tmp_path, vision)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1; hidden_size 32 and 2 heads make 2"),
        ({"head_dim": 8}, "head_dim = 8; hidden_size 32 and 2 heads make 16"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
    ],
)
def test_a_tower_of_another_shape_is_refused_by_name(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    ids = {"<|image>": 1, "<image|>": 2, "<|image|>": 3, "<|video|>": 4, "<|im_end|>": 5}
    config = gemma_images.gemma4_config("gemma4", ids, "float32", {})
    config["vision_config"] = {**config["vision_config"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        read_vision(ConfigFields(tmp_path / "config.json"))
