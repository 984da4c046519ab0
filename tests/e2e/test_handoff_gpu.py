"""Handoffs between nodes on one GPU, runner V2: exact tokens of every native family, and an FP8 cache.

python -m pytest -m gpu tests/e2e/test_handoff_gpu.py      needs NIXL beside the packages for GPUs
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, reference_greedy, reference_model
from fleet import Fleet
from node_client import RouterClient, greedy
from quantized_checkpoints import quantize

from pdserve.config.runner_oracle import VARIABLE

BLOCK, WINDOW, STEP, OUTPUT = 16, 20, 64, 24  # tokens: of a block, gpt-oss's window, a step and an answer
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW, WINDOW + 1, STEP + 6, 3 * STEP + 5)
FLAGS = ("--device", "cuda", "--max-batch-tokens", str(STEP), "--max-num-seqs", "8", "--max-model-len", "400")
FP8_CACHE = ("--kv-cache-dtype", "fp8_e4m3")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [random.Random(length).choices(range(3, 128), k=length) for length in lengths]


@contextmanager
def started(directory: Path, *flags: str, alone: bool = False) -> Iterator[Fleet]:
    """Yield a prefill and a decode node on the first GPU with runner V2; ``alone`` adds one without a peer."""
    environ = {VARIABLE: "1"}
    with Fleet() as fleet:
        fleet.start_prefill(directory, (*FLAGS, *flags), environ)
        fleet.start_decode(directory, (*FLAGS, *flags, "--handoff-min-tokens", "0"), environ)
        if alone:
            fleet.start_decode(directory, (*FLAGS, *flags), environ, peers=False)
        fleet.wait_ready(200.0)
        assert {node.describe().runner for node in fleet.nodes} == {"V2"}
        yield fleet


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss in MXFP4"])
def test_tokens_through_a_handoff_equal_transformers(family: str, tmp_path: Path) -> None:
    """Prompts around the sizes of blocks, windows and steps in float32, and again from the prefix caches."""
    name, _, packed = family.partition(" in ")
    directory = plain = make_checkpoint(tmp_path / "model", name, fused=bool(packed))
    if packed:
        directory = quantize(plain, tmp_path / "quantized", "mxfp4")
    reference = reference_model(plain)
    prompts = prompts_of(LENGTHS)
    expected = [reference_greedy(reference, prompt, OUTPUT) for prompt in prompts]
    with started(directory) as fleet, RouterClient(fleet.decode[0].address) as client:
        for _ in range(2):
            sent = [client.send(prompt, greedy(OUTPUT), fleet.prefill[0].address) for prompt in prompts]
            assert [each.wait(120).tokens for each in sent] == expected
        decode = fleet.decode[0]
        assert decode.counter("handoffs") == 2 * len(prompts)
        assert decode.counter("handoff_failures") == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_tokens_with_an_fp8_cache_equal_those_of_a_node_alone(family: str, tmp_path: Path) -> None:
    """In float32, where the tokens of a step do not depend on what else it computes."""
    directory = make_checkpoint(tmp_path / "model", family)
    with started(directory, *FP8_CACHE, alone=True) as fleet:
        decode, other = fleet.decode
        with RouterClient(decode.address) as client, RouterClient(other.address) as client_alone:
            for prompt in prompts_of(LENGTHS):
                handed_off = client.generate(prompt, greedy(OUTPUT), fleet.prefill[0].address).tokens
                assert handed_off == client_alone.generate(prompt, greedy(OUTPUT)).tokens, f"{len(prompt)} tokens"
        assert (decode.counter("handoffs"), other.counter("handoffs")) == (len(LENGTHS), 0)


def test_an_fp8_cache_sends_half_the_bytes_of_16_bits(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    read = []
    for flags in ((), FP8_CACHE):
        with started(directory, *flags) as fleet, RouterClient(fleet.decode[0].address) as client:
            for prompt in prompts_of(LENGTHS):
                client.generate(prompt, greedy(OUTPUT), fleet.prefill[0].address)
            assert fleet.decode[0].counter("handoffs") == len(LENGTHS)
            read.append(fleet.decode[0].counter("kv_read_bytes"))
    assert read[0] == 2 * read[1] > 0
