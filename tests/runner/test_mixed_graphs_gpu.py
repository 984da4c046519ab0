"""On a GPU, steps with prompts in CUDA graphs give the log-probabilities that they give outside.

PYTHONPATH=.:tests/support python -m pytest -c /dev/null --noconftest tests/runner/test_mixed_graphs_gpu.py
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from stepper import Running, Stepper

import runner
from pdserve.config.device import detect_devices
from pdserve.sampling_params import SamplingParams
from runner.graph_sizes import GraphSizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer"),
    pytest.mark.timeout(900),
]

CHUNK = 500
LENGTHS = (700, 3, 130, 1, 1600, 257, 64, 5, 900, 32)
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "max_position_embeddings": 4096}
WINDOWS = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "windows": ("qwen3", SIZES | WINDOWS),
    "experts": ("qwen3_moe", SIZES | {"moe_intermediate_size": 128}),
}


def generate(checkpoint: Path, quantization: str, graphs: bool) -> list[Running]:
    """Return four tokens behind prompts that arrive one after the other: most steps have chunks and decodes."""
    config = node_config(
        checkpoint,
        runner="V2",
        attention_backend="flashinfer",
        device="cuda",
        dtype="bfloat16",
        quantization=quantization,
        num_blocks=1024,
        max_model_len=4000,
        max_num_seqs=24,
        max_batch_tokens=2048,
    )
    config = msgspec.structs.replace(config, cuda_graphs=graphs, device=detect_devices("cuda", 1)[0])
    assert GraphSizes.of_node(config).most_mixed_tokens > 2 * CHUNK
    model_runner = runner.build(config, lambda stage, fraction: None)
    draw = random.Random(1)
    prompts = [[draw.randrange(2, 100) for _ in range(length)] for length in LENGTHS]
    sequences = Stepper(model_runner).generate(prompts, 4, SAMPLING, chunk=CHUNK, stagger=1)
    model_runner.close()
    return sequences


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_steps_in_graphs_equal_those_outside(model: str, quantization: str, tmp_path: Path) -> None:
    family, fields = MODELS[model]
    checkpoint = make_checkpoint(tmp_path, family, dtype="bfloat16", **fields)
    eager, captured = (generate(checkpoint, quantization, graphs) for graphs in (False, True))
    compared = 0
    for expected, replayed in zip(eager, captured, strict=True):
        for ours, theirs in zip(replayed.samples, expected.samples, strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=0.05)
            compared += 1
            if ours.token_id != theirs.token_id:  # nearly as likely: what follows is another text
                break
    assert compared > 2 * len(LENGTHS)
