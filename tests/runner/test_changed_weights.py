"""Reloads and patches of a running model: afterwards it is the model of the resulting checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config
from fast_set import examples
from hypothesis import given
from staged_node import StagedNode, generate, generate_alone
from weight_patches import CHANGES, MODELS, REQUESTS, Model, Steps, write_patch

import runner
from pdserve.config.node_config import NodeConfig
from pdserve.config.same_model import check_same_model
from pdserve.errors import CheckpointError
from pdserve.weights.change import WeightChange

_ROOT = Path(__file__).parents[2]

BACKENDS = {"V1": "torch", "V2": "triton"}


def config_of(directory: Path, model: Model, version: str, **parallel: Any) -> NodeConfig:
    options: dict[str, Any] = {"attention_backend": BACKENDS[version], "dtype": model.dtype, **parallel}
    return node_config(directory, runner=version, max_num_seqs=4, num_blocks=8, **options)


def check_alone(model: Model, version: str, steps: Steps) -> None:
    changes, result = model.changed(steps)
    ours = generate_alone(config_of(model.directory, model, version), REQUESTS, changes)
    assert ours == generate_alone(config_of(result, model, version), REQUESTS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("models"), "llama")


@examples(3)
@given(CHANGES)
def test_a_changed_model_is_that_of_the_resulting_checkpoint(llama: Model, steps: Steps) -> None:
    check_alone(llama, "V1", steps)


@pytest.mark.slow
def test_a_patched_and_reloaded_model_on_v2_is_that_of_the_resulting_checkpoint(llama: Model) -> None:
    check_alone(llama, "V2", [("patch", 1), ("reload", 2), ("patch", 3)])


@pytest.mark.slow
def test_weights_that_are_quantized_at_load_are_reloaded_and_not_patched(llama: Model) -> None:
    changes, result = llama.changed([("reload", 2)])
    before, after = (config_of(path, llama, "V2", quantization="fp8") for path in (llama.directory, result))
    check_same_model(before, result)
    assert generate_alone(before, REQUESTS, changes) == generate_alone(after, REQUESTS)
    name = "model.layers.0.self_attn.q_proj.weight"
    entries = {f"{name}.indices": torch.tensor([0]), f"{name}.values": llama.tensors[name].flatten()[:1]}
    patch = WeightChange(patch=str(write_patch(result / "patch.safetensors", entries)))
    with pytest.raises(CheckpointError, match="is quantized; patches change"):
        runner.build(before, lambda stage, fraction: None).change_weights(patch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_changed_model_is_that_of_the_resulting_checkpoint(tmp_path: Path, name: str, version: str) -> None:
    model = Model(tmp_path, name)

    @examples(12 if version == "V1" else 3)
    @given(CHANGES)
    def check(steps: Steps) -> None:
        check_alone(model, version, steps)

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "pp", "tp", "ep"),
    [
        *((name, pp, 3 - pp, 1) for name in MODELS for pp in (1, 2)),
        ("qwen3-moe-fused", 1, 2, 2),
        ("mixtral", 1, 2, 2),
    ],
)
def test_every_changed_model_of_two_ranks_is_that_of_the_resulting_checkpoint(
    tmp_path: Path, name: str, pp: int, tp: int, ep: int
) -> None:
    model = Model(tmp_path, name)
    numbers = random.Random(name)
    split = {"pp": pp, "tp": tp, "ep": ep}
    with StagedNode(2) as node:
        for version in ("V1", "V1", "V1", "V2"):
            steps = [(numbers.choice(("reload", "patch")), numbers.randrange(1 << 16)) for _ in range(3)]
            changes, result = model.changed(steps)
            ours, expected = (
                generate(node.started(config, weight_changes), config, REQUESTS)
                for config, weight_changes in (
                    (config_of(model.directory, model, version, **split), changes),
                    (config_of(result, model, version, **split), ()),
                )
            )
            assert ours == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_change_takes_memory_for_one_layer_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    """MALLOC_MMAP_THRESHOLD_ makes the C library return blocks of 1 MiB at once; it always does so from 32 MiB on."""
    directory = make_checkpoint(
        tmp_path, "llama", dtype=dtype, vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8
    )
    largest = max(8000 * 512, 512 * (512 * 2 + 256 * 2 + 2048 * 3)) * 4 / 2**20
    command = [sys.executable, "bench/reload.py", str(directory), "--rounds", "2", "--share", "0.05", "--device", "cpu"]
    environ = os.environ | {"PYTHONPATH": str(_ROOT), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    output = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"(reload|patch) +(\d+) MiB.*host +(\d+) MiB", output)
    assert len(lines) == 4, output
    for kind, size, peak in lines:  # the values of a small patch are kept
        most = 1.2 * largest if kind == "reload" else 1.5 * largest + int(size)  # with places of its values
        assert int(peak) <= most, output
