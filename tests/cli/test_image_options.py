"""Options, role and checkpoint of a node decide whether it refuses, continues or encodes images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint
from image_checkpoints import KINDS, make_image_checkpoint
from safetensors.torch import load_file, save_file

from cli.explain import as_text, describe
from pdserve.config.compatibility import compat_hash
from pdserve.config.memory_fit import check_room, image_memory
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.same_model import check_same_model
from pdserve.errors import CapacityError, CheckpointError, ConfigError
from pdserve.images import ImageMode
from pdserve.model.image_processor import read_image_processor

CPU = DeviceInfo(kind="cpu", index=0, name="cpu", memory=1 << 34)


def resolved(checkpoint: Path, encodes: bool = True, **options: Any) -> NodeConfig:
    sizes = {"kv_cache_memory": 4 << 20, "max_model_len": 1024}
    return resolve(NodeOptions(**{"model": str(checkpoint), **sizes, **options}), CPU, {}, encodes=encodes)


@pytest.fixture(scope="module", params=[kind for kind in KINDS if not kind.startswith("gemma4_")])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / request.param, request.param)


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, to change its files."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_checkpoints_with_a_tower_take_images(checkpoint: Path) -> None:
    config = resolved(checkpoint)
    vision = config.model.vision
    assert vision is not None
    assert config.images is ImageMode.TOWER
    assert config.image_processor == read_image_processor(checkpoint, vision)
    assert config.image_input is not None
    assert config.image_input.token_id == vision.image_token_id
    assert config.image_token_bytes == 64 * 4 * (1 + len(vision.deepstack))
    largest = 70 if checkpoint.name == "gemma4" else 256
    assert config.image_cache == 2 * largest * config.image_token_bytes
    assert config.has_tower
    assert config.image_hidden_bytes == vision.merge_size**2 * largest * 4 * vision.hidden_size
    assert image_memory(config) == config.image_cache + config.image_hidden_bytes + 4 * vision.num_weights
    with pytest.raises(CapacityError, match="weights"):
        check_room(config, "float32", 1 << 20)
    assert "images     a vision tower of" in as_text(config)
    tokens, most = {"mistral3": (9 * 17, 16 * 17), "gemma4": (66, 70)}.get(checkpoint.name, (252, 256))
    assert f"1920 × 1080 pixels are {tokens} tokens, the largest image {most}" in as_text(config)
    assert describe(config)["images"]["tokens_of_1080p"] == tokens


def test_nodes_that_do_not_compute_prompts_take_positions_unless_images_are_on(checkpoint: Path) -> None:
    config = resolved(checkpoint, encodes=False)
    assert config.images is ImageMode.POSITIONS
    assert config.image_processor is None
    assert config.image_cache == image_memory(config) == 0
    assert config.image_input == resolved(checkpoint).image_input
    assert "encoded by prefill nodes" in as_text(config)
    assert resolved(checkpoint, encodes=False, images="on").images is ImageMode.TOWER


def test_text_is_exchanged_with_nodes_without_images(checkpoint: Path) -> None:
    configs = [resolved(checkpoint), resolved(checkpoint, images="off"), resolved(checkpoint, encodes=False)]
    assert len({compat_hash(config.compat_fields) for config in configs}) == 1
    assert configs[1].images is ImageMode.NONE
    assert "images     refused: --images off" in as_text(configs[1])


def test_simulated_nodes_have_no_tower(checkpoint: Path) -> None:
    config = resolved(checkpoint, engine="simulated", kv_cache_memory=None)
    assert config.images is ImageMode.TOWER
    assert config.image_input is not None
    assert not config.has_tower


def test_nodes_without_weights_have_random_towers(checkpoint: Path) -> None:
    assert resolved(checkpoint, load_format="dummy").has_tower


def processor_fields(checkpoint: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((checkpoint / "preprocessor_config.json").read_text())
    return fields


def tower_tensors(checkpoint: Path) -> list[str]:
    """Return the names of the tensors of a checkpoint's tower."""
    vision = resolved(checkpoint).model.vision
    assert vision is not None
    names = load_file(checkpoint / "model.safetensors")
    return [name for name in names if name.removeprefix("model.").startswith(vision.tensors)]


def check_refused(checkpoint: Path, words: str, error: type[Exception] = ConfigError, **options: Any) -> None:
    """A node takes text only and says why, or does not start with ``images`` on."""
    config = resolved(checkpoint, **options)
    assert config.images is ImageMode.NONE
    assert config.image_input is None
    assert words in config.image_problem
    assert any(words in choice for choice in config.choices)
    with pytest.raises(error) as refused:
        resolved(checkpoint, images="on", **options)
    assert words in str(refused.value)


def test_a_checkpoint_without_an_image_processor(changed: Path) -> None:
    (changed / "preprocessor_config.json").unlink()
    check_refused(changed, "has no preprocessor_config.json")


def test_an_image_processor_that_is_not_supported(changed: Path) -> None:
    (changed / "preprocessor_config.json").write_text(json.dumps({**processor_fields(changed), "resample": 2}))
    check_refused(changed, "has resample = 2; supported is 3", CheckpointError)


def test_a_tower_that_is_not_supported(changed: Path) -> None:
    config = json.loads((changed / "config.json").read_text())
    name = "hidden_activation" if changed.joinpath("config.json").read_text().count("gemma4_vision") else "hidden_act"
    config["vision_config"][name] = "relu"
    (changed / "config.json").write_text(json.dumps(config))
    check_refused(changed, f"has {name} 'relu'")
    check_same_model(resolved(changed), changed)


def test_weights_without_a_tower(changed: Path) -> None:
    tensors = load_file(changed / "model.safetensors")
    for name in tower_tensors(changed):
        del tensors[name]
    save_file(tensors, changed / "model.safetensors")
    check_refused(changed, "has no tensors of a vision tower")


def test_a_quantized_tower(changed: Path) -> None:
    tensors = load_file(changed / "model.safetensors")
    name = next(name for name in tower_tensors(changed) if "mlp" in name or "feed_forward" in name)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, changed / "model.safetensors")
    check_refused(changed, f"the vision tower is quantized: {name} has dtype F8_E4M3")


def test_models_through_the_library(tmp_path: Path) -> None:
    checkpoint = make_image_checkpoint(tmp_path / "model", "qwen3_vl")
    check_refused(checkpoint, "serve its text model alone", model_impl="transformers")


def test_a_first_stage_without_the_layers_that_embeddings_join(tmp_path: Path) -> None:
    checkpoint = make_image_checkpoint(tmp_path / "model", "qwen3_vl")
    words = "the first pipeline stage has 3 layers, and images need 4 there"
    check_refused(checkpoint, words, pp=2, stage_layers=(3, 1))


def test_text_models_say_nothing_of_images(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    config = resolved(checkpoint, max_model_len=None)
    assert config.images is ImageMode.NONE
    assert "image" not in as_text(config)
    with pytest.raises(ConfigError, match="images on: Qwen3ForCausalLM is a text model"):
        resolved(checkpoint, max_model_len=None, images="on")


def test_the_cache_holds_the_largest_image(checkpoint: Path) -> None:
    tokens = 70 if checkpoint.name == "gemma4" else 256
    largest = tokens * resolved(checkpoint).image_token_bytes
    assert resolved(checkpoint, image_cache=largest).image_cache == largest
    with pytest.raises(ConfigError, match=rf"image_cache {largest - 1} .* {tokens} embeddings.*at least {largest}"):
        resolved(checkpoint, image_cache=largest - 1)
    assert resolved(checkpoint, image_cache=largest - 1, max_model_len=tokens - 1).images is ImageMode.TOWER
    with pytest.raises(ConfigError, match="image_cache 5 needs images, which are off"):
        resolved(checkpoint, image_cache=5, images="off")


def test_a_checkpoint_with_another_image_processor_is_not_reloaded(checkpoint: Path, changed: Path) -> None:
    config = resolved(checkpoint)
    check_same_model(config, changed)
    fields = processor_fields(changed)
    (changed / "preprocessor_config.json").unlink()
    check_same_model(config, changed)
    nested = {"image_processor": {**fields, "image_mean": 0.25, "rescale_factor": 0.25}}
    (changed / "processor_config.json").write_text(json.dumps(nested))
    with pytest.raises(CheckpointError, match="has another image processor than this node"):
        check_same_model(config, changed)
    check_same_model(msgspec.structs.replace(config, image_input=None), changed)
