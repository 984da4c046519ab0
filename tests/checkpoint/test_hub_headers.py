"""`pdserve explain HUB_ID` reads the headers of the weights, not the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from fake_hub import FakeHub
from safetensors.torch import save_file
from torch import rand, tensor

from pdserve.checkpoint.hub_headers import write_sparse
from pdserve.checkpoint.safetensors_header import read_header
from pdserve.errors import CheckpointError

NAME = "test/model"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> FakeHub:
    directory = make_checkpoint(tmp_path_factory.mktemp("hub") / "model", "llama", hidden_size=512, num_hidden_layers=4)
    return FakeHub(NAME, directory)


def explain(hub: FakeHub, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environ.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "cli", "explain", "--device", "cpu", *flags]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_explain_reads_headers_of_a_hub_model_and_says_what_it_says_of_its_directory(
    hub: FakeHub, tmp_path: Path
) -> None:
    directory = str(hub.files["config.json"].parent)
    local = explain(hub, tmp_path, directory, "--served-model-name", "m")
    with hub.running():
        result = explain(hub, tmp_path, NAME, "--served-model-name", "m")
    assert result.returncode == 0, result.stderr
    assert result.stdout == local.stdout.replace(directory, NAME)
    weights = [path for name, path in hub.files.items() if name.endswith(".safetensors")]
    assert sum(hub.sent[path.name] for path in weights) < sum(path.stat().st_size for path in weights) / 10


def test_long_headers_and_scales_of_the_kv_cache_are_copied(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.a.tensor.with.a.long.name.weight" for layer in range(4000)]
    tensors = {name: rand(2) for name in names} | {"model.layers.0.self_attn.k_scale": tensor([0.25])}
    save_file(tensors, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    copy = tmp_path / "copy.safetensors"
    write_sparse(copy, len(data), lambda begin, end: data[begin:end])
    header = read_header(copy)
    assert header == read_header(tmp_path / "whole.safetensors")
    scale = header["model.layers.0.self_attn.k_scale"]
    assert copy.read_bytes()[scale.begin : scale.end] == data[scale.begin : scale.end]


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}more"])
def test_a_file_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        write_sparse(tmp_path / "model.safetensors", len(data), lambda begin, end: data[begin:end])
