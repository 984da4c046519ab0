"""Two pipeline stages on two GPUs sample the tokens of one GPU. With pytest and transformers as the only tools:

PYTHONPATH=.:tests/support:tests/runner pytest -c /dev/null --noconftest tests/runner/test_pipeline_stages_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from staged_node import StagedNode, generate, generate_alone
from test_pipeline_stages import check, config_of, requests_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_two_stages_sample_the_tokens_of_one_gpu(tmp_path: Path, version: str) -> None:
    """Copy engines carry the messages; V2 has three steps in flight, and tokens return without the host."""
    directory = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=4)
    config = config_of(directory, version, pp=2, device="cuda")
    requests = requests_of(version) + requests_of("V1")
    with StagedNode(2) as node:
        outputs = generate(node.started(config), config, requests, at_once=5)
    check(requests, outputs, generate_alone(config_of(directory, version, device="cuda"), requests))
