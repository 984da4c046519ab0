"""Reloads and patches of a running model: afterwards it is the model of the resulting checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_node import Request, StagedNode, generate, generate_alone
from weight_patches import Tensors, patched, random_patch, read_tensors, write_checkpoint, write_patch

from pdserve.config.node_config import NodeConfig
from pdserve.records import SamplingParams
from pdserve.weight_change import WeightChange

_ROOT = Path(__file__).parents[2]
_SAMPLING = SamplingParams(3, temperature=0.0, logprobs=20, ignore_eos=True)
REQUESTS = [Request(tuple((7 * index + seed) % 120 + 3 for index in range(20)), _SAMPLING) for seed in range(2)]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 131, "num_hidden_layers": 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 130, "num_hidden_layers": 2}),
    "qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 2}),
    "qwen3-moe-fused": ("qwen3_moe", {"num_hidden_layers": 2, "fused": True}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 2}),
    "glm4-moe": ("glm4_moe", {"num_hidden_layers": 2}),
    "minimax-m2": ("minimax_m2", {"num_hidden_layers": 2}),
    "mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "float16-products": ("llama", {"dtype": "bfloat16", "num_hidden_layers": 2}),
}
BACKENDS = {"V1": "torch", "V2": "triton"}

Steps = list[tuple[str, int]]  # kind of change and seed

changes = st.lists(st.tuples(st.sampled_from(["reload", "patch"]), st.integers(0, 1 << 16)), max_size=4)


class Model:
    """A checkpoint, and sequences of changes of it."""

    def __init__(self, folder: Path, name: str) -> None:
        family, options = MODELS[name]
        self.directory = make_checkpoint(folder / name, family, **options)
        self.dtype: str = options.get("dtype", "float32")
        self.tensors = read_tensors(self.directory)
        self._folder = folder

    def changed(self, steps: Steps) -> tuple[tuple[WeightChange, ...], Path]:
        """Return random changes, and the checkpoint that they result in."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        tensors, found = self.tensors, []
        for number, (kind, seed) in enumerate(steps):
            if kind == "reload":
                tensors = self._drawn(seed)
                found.append(WeightChange(str(write_checkpoint(folder / str(number), self.directory, tensors))))
            else:
                entries = random_patch(tensors, seed)
                tensors = patched(tensors, entries)
                found.append(WeightChange(patch=str(write_patch(folder / f"{number}.safetensors", entries))))
        return tuple(found), write_checkpoint(folder / "result", self.directory, tensors)

    def _drawn(self, seed: int) -> Tensors:
        """Return tensors whose values are those of this checkpoint in another order, with other signs."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (tensor.view(-1)[torch.randperm(tensor.numel(), generator=generator)] * -0.9).view(tensor.shape)
            for name, tensor in self.tensors.items()
        }


def config_of(directory: Path, model: Model, version: str, **parallel: Any) -> NodeConfig:
    options: dict[str, Any] = {"attention_backend": BACKENDS[version], "dtype": model.dtype, **parallel}
    return node_config(directory, runner=version, max_num_seqs=4, num_blocks=8, **options)


def check_alone(model: Model, version: str, steps: Steps) -> None:
    found, result = model.changed(steps)
    ours = generate_alone(config_of(model.directory, model, version), REQUESTS, found)
    assert ours == generate_alone(config_of(result, model, version), REQUESTS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("models"), "llama")


@settings(max_examples=3)
@given(changes)
def test_a_changed_model_is_that_of_the_resulting_checkpoint(llama: Model, steps: Steps) -> None:
    check_alone(llama, "V1", steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_changed_model_is_that_of_the_resulting_checkpoint(tmp_path: Path, name: str, version: str) -> None:
    model = Model(tmp_path, name)

    @settings(max_examples=12 if version == "V1" else 3)
    @given(changes)
    def check(steps: Steps) -> None:
        check_alone(model, version, steps)

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_every_changed_model_of_two_ranks_is_that_of_the_resulting_checkpoint(
    tmp_path: Path, name: str, pp: int, tp: int
) -> None:
    model, numbers = Model(tmp_path, name), random.Random(name)
    with StagedNode(2) as node:
        for version in ("V1", "V1", "V1", "V2"):
            steps = [(numbers.choice(("reload", "patch")), numbers.randrange(1 << 16)) for _ in range(3)]
            found, result = model.changed(steps)
            ours, expected = (
                generate(node.started(config, each), config, REQUESTS)
                for config, each in (
                    (config_of(model.directory, model, version, pp=pp, tp=tp), found),
                    (config_of(result, model, version, pp=pp, tp=tp), ()),
                )
            )
            assert ours == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_change_takes_memory_for_one_layer_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    """Here the C library returns blocks of 1 MiB at once, as it always does with those of 32 MiB."""
    directory = make_checkpoint(
        tmp_path, "llama", dtype=dtype, vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8
    )
    largest = max(8000 * 512, 512 * (512 * 2 + 256 * 2 + 2048 * 3)) * 4 / 2**20
    command = [sys.executable, "bench/reload.py", str(directory), "--rounds", "2", "--share", "0.05", "--device", "cpu"]
    environ = os.environ | {"PYTHONPATH": str(_ROOT), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    output = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(reload|patch) +(\d+) MiB.*host +(\d+) MiB", output)
    assert len(found) == 4, output
    for kind, size, peak in found:  # the values of a small patch are kept
        assert int(peak) <= 1.2 * largest + (int(size) if kind == "patch" else 0), output
