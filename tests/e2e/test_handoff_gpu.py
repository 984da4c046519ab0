"""Handoffs between two nodes on one GPU, runner V2: exact tokens of every native family, and the bytes of an FP8 cache.

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
def test_an_fp8_cache_sends_half_the_bytes_and_keeps_the_tokens(family: str, tmp_path: Path) -> None:
    """In bfloat16. Greedy tokens with a handoff equal those of a decode node alone."""
    directory = make_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    read: dict[str, float] = {}
    for kv_dtype in ("auto", "fp8_e4m3"):
        with started(directory, "--kv-cache-dtype", kv_dtype, alone=True) as fleet:
            decode, other = fleet.decode
            with RouterClient(decode.address) as client, RouterClient(other.address) as client_alone:
                for prompt in prompts_of(LENGTHS):
                    handed_off = client.generate(prompt, greedy(OUTPUT), fleet.prefill[0].address).tokens
                    assert handed_off == client_alone.generate(prompt, greedy(OUTPUT)).tokens, f"{len(prompt)} tokens"
            assert decode.counter("handoffs") == len(LENGTHS)
            assert other.counter("handoffs") == 0
            read[kv_dtype] = decode.counter("kv_read_bytes")
    assert read["fp8_e4m3"] == read["auto"] / 2 > 0
