"""Chats with images on nodes that share a GPU: tokens and log-probabilities are those of the library on the CPU.

python -m pytest -m gpu tests/e2e/test_images_gpu.py     needs NIXL

Nodes compute in float32. Of four, those of runner V2 use CUDA graphs; chunks of 48 tokens cut images.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fleet import Fleet
from image_chats import num_images
from image_checkpoints import KINDS, make_image_checkpoint
from served_images import OUTPUT, Served, conversations, flags_of

from pdserve.config.runner_oracle import VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(500),
]

RUNNERS = {"V1": {VARIABLE: "0"}, "V2": {VARIABLE: "1"}}
START = 200.0  # seconds
NODE = ("--device", "cuda", "--dtype", "float32", "--attention-backend", "triton", "--kv-cache-memory", "1GiB")


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("sees") / "model", request.param)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    """A node of each role and runner. Nodes D encode no images."""
    with Fleet() as fleet:
        for environ in RUNNERS.values():
            fleet.start_prefill(directory, (*NODE, *flags_of(directory)), environ)
        for environ in RUNNERS.values():
            fleet.start_decode(directory, (*NODE, *flags_of(directory), "--handoff-min-tokens", "0"), environ)
        fleet.wait_ready(START)
        yield Served(directory, fleet)


def test_answers_behind_handoffs_are_the_library_s(served: Served) -> None:
    chats = conversations(1, 16)
    assert sum(map(num_images, chats)) > 16
    for _ in range(2):
        served.check(chats)  # the second time, all is in the prefix caches
    fleet = served.fleet
    assert sum(node.counter("handoffs") for node in fleet.decode) > len(chats)
    assert sum(node.counter("handoff_failures") for node in fleet.decode) == 0


def test_large_images_among_streams(served: Served) -> None:
    """While some stream, others come: their images are encoded in pieces."""
    for seed in range(2, 5):
        served.check(conversations(seed, 12, longest=600), 3 * OUTPUT)
