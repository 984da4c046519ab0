"""A node, ``pdserve explain`` and ``doctor`` say the same of published models, before weights are read."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import make_any_checkpoint
from checkpoints import make_checkpoint, node_config
from fast_set import sampled
from machine import patience
from model_table import EXACT, NOT_BUILT, PAGE, causal_types, sweep
from published_configs import PUBLISHED, PublishedConfig
from safetensors.torch import load_file, save_file

import runner
from cli.explain import main as explain
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import CheckpointError, ConfigError
from runner.distributed.parallel_state import ParallelState
from runner.loading.checkpoint_check import check_tensors
from runner.loading.library_weights import LibraryWeights
from runner.models.from_transformers.decoder import TransformersDecoder
from runner.placement import TensorPlacement

REFUSED = [name for name, published in PUBLISHED.items() if published.refused]
SERVED = [name for name in PUBLISHED if name not in REFUSED]


def resolved(published: PublishedConfig, directory: Path) -> NodeConfig:
    options = NodeOptions(
        model=str(directory),
        device="cpu",
        dtype="float32",
        kv_cache_memory=1 << 22,
        load_format="dummy",
        max_model_len=published.max_model_len,
    )
    return resolve(options, DeviceInfo("cpu", 0, "cpu", 1 << 34), {})


def refusal(published: PublishedConfig, directory: Path, *, builds: bool) -> str:
    """Return why a node refuses, as it starts if it ``builds``, else as explain and doctor find out; empty if not."""
    try:
        config = resolved(published, directory)
        if builds:
            runner.build(config, lambda stage, fraction: None).close()
        else:
            check_tensors(config)
    except ConfigError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("name", [*sampled(SERVED, every=3), *REFUSED])
def test_explain_says_what_a_node_says(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    directory = published.write(tmp_path / "model")
    explained = refusal(published, directory, builds=False)
    assert refusal(published, directory, builds=True) == explained
    assert bool(explained) == bool(published.refused)
    assert re.search(published.refused, explained), explained


class _Forbidden:
    """A slice of a checkpoint that must not be read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        raise AssertionError("it was read")


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("jetmoe", lambda tensors: None, "heads per layer follow"),
        ("llama4_text", lambda tensors: None, "give --max-model-len 16"),
        ("olmo2", lambda tensors: tensors.pop("model.norm.weight"), "missing keys: model.norm.weight"),
        ("olmo2", lambda tensors: tensors.update({"x.weight": torch.ones(3)}), "unexpected keys: x.weight"),
        (
            "qwen2_moe",
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(3, 3)}),
            r"mismatched keys: lm_head.weight \[3, 3\]",
        ),
    ],
)
def test_a_library_model_is_refused_before_its_weights_are_read(
    model_type: str, change: Any, words: str, tmp_path: Path
) -> None:
    chunks = {"attention_chunk_size": 16} if model_type == "llama4_text" else {}
    directory = make_any_checkpoint(tmp_path / "model", model_type, **chunks)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = node_config(directory)
    with pytest.raises(ConfigError, match=words):
        check_tensors(config)
    slices = {name: _Forbidden(tensor) for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=words):
        library_weights(config).load(directory, slices, None, 1)  # type: ignore[arg-type]


def library_weights(config: NodeConfig) -> LibraryWeights:
    placement = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)
    decoder = TransformersDecoder(config.model, ParallelState(config.position, config.device, ""), placement)
    return LibraryWeights(decoder, config.kv_layout, placement)


def test_changed_weights_of_a_library_model_are_checked_before_the_old_ones_go(tmp_path: Path) -> None:
    directory = make_any_checkpoint(tmp_path / "model", "olmo2")
    weights = library_weights(node_config(directory))
    tensors = load_file(directory / "model.safetensors")
    weights.check(directory, {name: _Forbidden(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing keys: model\.norm\.weight"):
        weights.check(directory, {name: _Forbidden(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]


def lose_a_tensor(directory: Path) -> Path:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "native, a tensor is missing": (lambda path: lose_a_tensor(make_checkpoint(path, "llama")), "model.norm.weight"),
    "library, a tensor is missing": (lambda path: lose_a_tensor(make_any_checkpoint(path, "olmo2")), "missing keys"),
    "library, other heads": (lambda path: make_any_checkpoint(path, "jetmoe"), "heads per layer follow"),
}


@pytest.mark.parametrize("name", sampled(CHECKPOINTS, every=2))
def test_explain_refuses_a_checkpoint_that_a_node_refuses(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, words = CHECKPOINTS[name]
    command = [str(make(tmp_path / "model")), "--device", "cpu", "--kv-cache-memory", "64MiB", "--max-model-len", "256"]
    assert explain(command) == 2
    assert re.search(words, capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHECKPOINTS, "Llama-4-Scout", "MiniMax-M2-AWQ", "Qwen3-8B-4bit of MLX"])
def test_a_node_process_ends_with_the_words_of_explain(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    flags = ["--device", "cpu", "--kv-cache-memory", "64MiB", "--max-model-len", "256"]
    if name in CHECKPOINTS:
        CHECKPOINTS[name][0](directory)
    else:
        PUBLISHED[name].write(directory)
        flags += ["--load-format", "dummy"]
    assert explain([str(directory), *flags]) == 2
    explained = capfd.readouterr().err.strip().splitlines()[-1]
    command = [sys.executable, "-m", "prefill_node", str(directory), *flags, "--port", "0"]
    node = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert node.returncode == 2
    assert explained.removeprefix("pdserve: error: ") in node.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_layers_without_values_tell_what_loaded_ones_do(tmp_path: Path) -> None:
    """The page has the verdicts of models with their weights."""

    def check(directory: Path) -> None:
        check_tensors(node_config(directory))

    outcomes = sweep(tmp_path, check)
    assert {name for name in causal_types() if outcomes[name] not in (EXACT, NOT_BUILT)} == refused_types()


def refused_types() -> set[str]:
    return {
        kind for line in PAGE.read_text().splitlines() if line.startswith("| refused") for kind in types_of_row(line)
    }


def types_of_row(row: str) -> list[str]:
    return [kind.strip() for kind in row.split("|")[2].split(",")]
