"""Model directories, and errors for weights that are broken or of another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, node_config
from differential import EQUAL, compare, edited
from safetensors.torch import load_file, save_file

import runner
from pdserve.checkpoint.hub import resolve_model
from pdserve.checkpoint.weight_files import read_headers
from pdserve.errors import CheckpointError
from pdserve.model.model_config import load_model_config

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


def build(directory: Path) -> None:
    runner.build(node_config(directory), lambda stage, fraction: None)


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/nowhere/at/all", "a/b/c", "../no-such-model", "has space"])
def test_neither_directory_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing directory nor a hub id"):
        resolve_model(model)


def test_a_file_is_refused_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; use the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_gguf_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"GGUF is not read; convert it: .* python -c .*model\.gguf"):
        resolve_model(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"GGUF is not read; convert it: .* python -c .*model\.gguf"):
        read_headers(tmp_path)
    with pytest.raises(CheckpointError, match=r"GGUF is not read; convert it: .* python -c .*model\.gguf"):
        load_model_config(tmp_path)


def test_a_failed_download_names_the_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="is not a local directory, and its download from the hub failed"):
        resolve_model("pdserve/does-not-exist")


def test_a_directory_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    for refused in (build, read_headers):
        with pytest.raises(CheckpointError, match=r"has no \*.safetensors"):
            refused(checkpoint)


@pytest.mark.parametrize("size", [0, 5, 1000, 100_000])
def test_truncated_weights_are_refused(checkpoint: Path, size: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors.*truncated.*download"):
        build(checkpoint)


def test_truncated_weights_have_no_headers(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated at 1000 bytes"):
        read_headers(checkpoint)


def test_missing_tensors_are_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the tensors model.layers.1.self_attn.k_proj.weight;"):
        build(checkpoint)


def test_wrong_shapes_are_named(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(95, 64)}))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(95, 64\), config.json asks for \(96, 64\)"):
        build(checkpoint)


def test_unexpected_tensors_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj.bias has no place in the model"):
        build(checkpoint)


def test_integer_weights_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has dtype I8, which cannot become torch.float32"):
        build(checkpoint)


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "glm4_moe", num_hidden_layers=1, num_mtp_layers=1)
    rewrite(directory, lambda tensors: tensors.update({"model.layers.1.eh_proj.weight": torch.zeros(4, 8)}))
    build(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.eh_proj\.weight has no place"):
        build(directory)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_stored_head_that_differs_from_the_embedding_is_used_although_config_ties_them(
    impl: str, tmp_path: Path
) -> None:
    stored = make_checkpoint(tmp_path / "stored", "llama")
    directory = edited(stored, tmp_path / "model", {"tie_word_embeddings": True})
    assert compare(directory, [[1, 2, 3]], impl=impl) == EQUAL
    assert not load_model_config(directory).tie_word_embeddings
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert compare(directory, [[1, 2, 3]], impl=impl) == EQUAL
    assert load_model_config(directory).tie_word_embeddings  # one copy in memory


def test_computed_buffers_in_a_checkpoint_are_skipped(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(checkpoint, lambda tensors: tensors.update(extra))
    build(checkpoint)


def test_an_index_that_is_broken_or_names_absent_files_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama", max_shard_size="60KB")
    index = checkpoint / "model.safetensors.index.json"
    shard = sorted(set(json.loads(index.read_text())["weight_map"].values()))[1]
    (checkpoint / shard).unlink()
    with pytest.raises(CheckpointError, match=f"names '{shard}', which is missing"):
        build(checkpoint)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index.json cannot be read"):
        build(checkpoint)
