"""Nodes with an FP8 KV cache hand over a quarter of the bytes of float32; nodes with another cache are refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import add_tensors, make_checkpoint, node_config
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess
from node_client import RouterClient, greedy
from stepper import Stepper

import runner
from pdserve.kv.layout import KVScales

OUTPUT = 12  # tokens
SCALES = (KVScales(0.03125, 0.0625), KVScales(0.015625, 0.125))
FLAGS = ("--kv-cache-dtype", "fp8_e4m3", "--max-batch-tokens", "64", "--max-num-seqs", "8")
DECODE_FLAGS = (*FLAGS, "--handoff-min-tokens", "0")
BACKENDS = {"V1": "torch", "V2": "triton"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=len(SCALES))
    scales = {
        f"model.layers.{layer}.self_attn.{plane}_scale": torch.tensor(getattr(layer_scales, plane))
        for layer, layer_scales in enumerate(SCALES)
        for plane in "kv"
    }
    add_tensors(directory, scales)
    return directory


def alone(directory: Path, version: str, prompt: list[int]) -> list[int]:
    """Return the tokens of one runner with the same cache."""
    config = node_config(directory, kv_scales=SCALES, runner=version, attention_backend=BACKENDS[version])
    return Stepper(runner.build(config, lambda stage, fraction: None)).generate([prompt], OUTPUT)[0].output


def block_bytes(node: NodeProcess) -> int:
    """Return the bytes of a block whose elements have one byte."""
    layout = node.describe().kv_layout
    return layout.block_size * layout.num_layers * 2 * layout.num_kv_heads * layout.head_dim


@pytest.mark.parametrize("version", ["V1", pytest.param("V2", marks=pytest.mark.slow)])
def test_tokens_equal_those_of_a_runner_alone(version: str, checkpoint: Path) -> None:
    prompts = [random.Random(length).choices(range(3, 128), k=length) for length in (15, 16, 70)]
    with Fleet() as fleet:
        prefill = fleet.start_prefill(checkpoint, FLAGS, RUNNER_ENVIRONMENTS[version])
        decode = fleet.start_decode(checkpoint, DECODE_FLAGS, RUNNER_ENVIRONMENTS[version])
        fleet.wait_ready()
        with RouterClient(decode.address) as client:
            for prompt in prompts:
                expected = alone(checkpoint, version, prompt)
                for peer in (prefill.address, ""):  # the second time the prompt is in the prefix cache
                    assert client.generate(prompt, greedy(OUTPUT, ignore_eos=True), peer).tokens == expected
        assert decode.counter("handoffs") == len(prompts)
        num_blocks = sum(-(-len(prompt) // decode.describe().kv_layout.block_size) for prompt in prompts)
        assert decode.counter("kv_read_bytes") == num_blocks * block_bytes(decode)


@pytest.mark.slow
def test_nodes_with_another_cache_are_refused_by_name(checkpoint: Path) -> None:
    with Fleet() as fleet:
        fleet.start_prefill(checkpoint)
        fleet.start_prefill(checkpoint, [*FLAGS, "--load-format", "dummy"])  # without the checkpoint's scales
        decode = fleet.start_decode(checkpoint, [*DECODE_FLAGS, "--peer-wait", "1"])
        fleet.wait_ready()
        scales = "k 0.01562 … 0.03125, v 0.0625 … 0.125 in 2 layers"
        refusals = "kv_dtype: float32 here, fp8_e4m3 there; kv_scales: none here", "kv_scales: 1.0 here"
        fleet.wait_until(lambda: all(f"{refusal}, {scales}" in decode.output for refusal in refusals), 20.0)
        prompt = [(7 * index) % 120 + 3 for index in range(50)]
        with RouterClient(decode.address) as client:
            answer = client.generate(prompt, greedy(OUTPUT, ignore_eos=True), fleet.prefill[0].address)
        assert answer.tokens == alone(checkpoint, "V1", prompt)
        assert decode.counter("handoffs") == 0
        assert list(decode.describe().connected_peers) == []
