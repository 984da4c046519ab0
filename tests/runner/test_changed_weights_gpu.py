"""Reloads and patches on a GPU: captured graphs and kernels compute with the new weights, bit for bit.

With pytest, hypothesis and transformers as the only development tools:

    PYTHONPATH=.:tests/support python -m pytest -c /dev/null --noconftest tests/runner/test_changed_weights_gpu.py
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import node_config
from staged_node import StagedNode, generate, generate_alone
from weight_patches import REQUESTS, Model

from pdserve.config.node_config import NodeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]

NAMES = ("llama", "qwen3-tied", "qwen3-moe", "qwen3-moe-fused", "gpt-oss", "minimax-m2")


def config_of(directory: Path, version: str, **parallel: Any) -> NodeConfig:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", **parallel}
    return node_config(directory, runner=version, max_num_seqs=4, num_blocks=64, max_batch_tokens=64, **options)


@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_model_is_that_of_the_resulting_checkpoint(tmp_path: Path, name: str, version: str) -> None:
    """V2 replays graphs that it captured with the old weights."""
    model = Model(tmp_path, name, dtype="bfloat16")
    numbers = random.Random(name)
    for kinds in (("reload",), ("patch",), ("patch", "reload", "patch", "patch")):
        changes, result = model.changed([(kind, numbers.randrange(1 << 16)) for kind in kinds])
        ours = generate_alone(config_of(model.directory, version), REQUESTS, changes)
        assert ours == generate_alone(config_of(result, version), REQUESTS)
        if kinds == ("reload",):
            assert ours != generate_alone(config_of(model.directory, version), REQUESTS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1)])
def test_a_changed_model_of_two_ranks_is_that_of_the_resulting_checkpoint(tmp_path: Path, pp: int, tp: int) -> None:
    model = Model(tmp_path, "qwen3-tied", dtype="bfloat16")
    changes, result = model.changed([("patch", 1), ("reload", 2), ("patch", 3)])
    with StagedNode(2) as node:
        ours, expected = (
            generate(node.started(config, weight_changes), config, REQUESTS)
            for config, weight_changes in (
                (config_of(model.directory, "V2", pp=pp, tp=tp), changes),
                (config_of(result, "V2", pp=pp, tp=tp), ()),
            )
        )
    assert ours == expected
