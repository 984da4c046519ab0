"""Handoffs between nodes with runner V2: exact tokens of every native family, and an FP8 cache.

python -m pytest -m gpu tests/e2e/test_v2_families.py     all nodes on one GPU; needs NIXL beside the packages for GPUs
python -m pytest -m slow tests/e2e/test_v2_families.py    on CPUs, in Triton's interpreter, with fewer tokens
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, reference_greedy, reference_model
from fleet import RUNNER_ENVIRONMENTS, Fleet
from node_client import RouterClient, greedy
from quantized_checkpoints import quantize

from pdserve.config.runner_oracle import VARIABLE

BLOCK = 16  # tokens
WINDOW = 20  # tokens of gpt-oss's window
STEP = 64  # tokens
FLAGS = ("--max-batch-tokens", str(STEP), "--max-num-seqs", "8", "--max-model-len", "400")
FP8_CACHE = ("--kv-cache-dtype", "fp8_e4m3")
START = 200.0  # seconds
ANSWER = 200.0  # seconds


class Place(NamedTuple):
    device: str
    environ: Mapping[str, str]
    lengths: tuple[int, ...]  # prompt tokens: around BLOCK, WINDOW and STEP
    output: int  # tokens of an answer

    @property
    def prompts(self) -> list[list[int]]:
        return [random.Random(length).choices(range(3, 128), k=length) for length in self.lengths]


GPU = Place("cuda", {VARIABLE: "1"}, (1, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW, WINDOW + 1, STEP + 6, 3 * STEP + 5), 24)
CPU = Place("cpu", RUNNER_ENVIRONMENTS["V2"], (1, BLOCK + 1, WINDOW + 1, STEP + 6), 8)

PLACES = [pytest.param(GPU, marks=pytest.mark.gpu, id="gpu"), pytest.param(CPU, marks=pytest.mark.slow, id="cpu")]
pytestmark = [pytest.mark.timeout(500), pytest.mark.parametrize("place", PLACES)]


@contextmanager
def started(place: Place, directory: Path, flags: Sequence[str] = (), alone: bool = False) -> Iterator[Fleet]:
    """Yield a prefill and a decode node with runner V2; ``alone`` adds a decode node without a peer."""
    if place is GPU and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    flags = (*FLAGS, "--device", place.device, *flags)
    with Fleet() as fleet:
        fleet.start_prefill(directory, flags, place.environ)
        fleet.start_decode(directory, (*flags, "--handoff-min-tokens", "0"), place.environ)
        if alone:
            fleet.start_decode(directory, flags, place.environ, peers=False)
        fleet.wait_ready(START)
        assert {node.describe().runner for node in fleet.nodes} == {"V2"}
        yield fleet


QUANTIZED = ("gpt_oss in mxfp4", "qwen3_moe in nvfp4")


@pytest.mark.parametrize("family", [*FAMILIES, *QUANTIZED])
def test_tokens_through_a_handoff_equal_transformers(family: str, place: Place, tmp_path: Path) -> None:
    """In float32, all prompts at once, and again from the prefix caches."""
    name, _, packed = family.partition(" in ")
    directory = plain = make_checkpoint(tmp_path / "model", name, fused=packed == "mxfp4")
    if packed:
        directory = quantize(plain, tmp_path / "quantized", packed)
    reference = reference_model(plain)
    expected = [reference_greedy(reference, prompt, place.output) for prompt in place.prompts]
    with started(place, directory) as fleet, RouterClient(fleet.decode[0].address) as client:
        for _ in range(2):
            sent = [client.send(prompt, greedy(place.output), fleet.prefill[0].address) for prompt in place.prompts]
            assert [request.wait(ANSWER).tokens for request in sent] == expected
        decode = fleet.decode[0]
        assert decode.counter("handoffs") == 2 * len(expected)
        assert decode.counter("handoff_failures") == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_tokens_with_an_fp8_cache_equal_those_of_a_node_alone(family: str, place: Place, tmp_path: Path) -> None:
    """In float32, where the tokens of a step do not depend on what else it computes."""
    directory = make_checkpoint(tmp_path / "model", family)
    sampling = greedy(place.output)
    with started(place, directory, FP8_CACHE, alone=True) as fleet:
        decode, other = fleet.decode
        with RouterClient(decode.address) as client, RouterClient(other.address) as client_alone:
            for prompt in place.prompts:
                handed_off = client.send(prompt, sampling, fleet.prefill[0].address).wait(ANSWER)
                alone = client_alone.send(prompt, sampling).wait(ANSWER)
                assert handed_off.tokens == alone.tokens, f"a prompt of {len(prompt)} tokens"
        assert (decode.counter("handoffs"), other.counter("handoffs")) == (len(place.lengths), 0)


def test_an_fp8_cache_sends_half_the_bytes_of_16_bits(place: Place, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    read = []
    for flags in ((), FP8_CACHE):
        with started(place, directory, flags) as fleet, RouterClient(fleet.decode[0].address) as client:
            for prompt in place.prompts:
                client.send(prompt, greedy(place.output), fleet.prefill[0].address).wait(ANSWER)
            assert fleet.decode[0].counter("handoffs") == len(place.lengths)
            read.append(fleet.decode[0].counter("kv_read_bytes"))
    assert read[0] == 2 * read[1] > 0
