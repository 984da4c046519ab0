"""Tensors that a runner reads from the memory of another one, over NIXL: exact, checked, and no more than offered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, node_config
from stepper import Stepper

import connector
import runner
from pdserve.checkpoint.weight_digests import checkpoint_digests, known_digests
from pdserve.protocols import ModelRunner, WeightSource
from pdserve.weight_sharing import OfferedMemory, RankWeights, TensorPart, WeightPeer, cover

PROMPT = [(7 * index) % 120 + 3 for index in range(30)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Experts are in memory as they are stored, also on a CPU."""
    return make_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)


@pytest.fixture
def serving(checkpoint: Path) -> Iterator[ModelRunner]:
    while known_digests(checkpoint) is None:  # files of the last moment are not cached
        checkpoint_digests(checkpoint)
    built = runner.build(node_config(checkpoint), lambda stage, fraction: None)
    yield built
    built.close()


def read_from(source: WeightSource, checkpoint: Path) -> list[int]:
    """Return the tokens of a runner that reads what ``source`` offers."""
    reader = connector.weight_reader(WeightPeer("a peer", (source.offer,)))
    built = runner.build(node_config(checkpoint), lambda stage, fraction: None, reader=reader)
    try:
        return tokens(built)
    finally:
        built.close()


def tokens(built: ModelRunner) -> list[int]:
    return Stepper(built).generate([PROMPT], 6)[0].output


def test_weights_of_a_peer_are_used_if_their_digests_are_right(
    serving: ModelRunner, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One tensor is offered at the address of another one of its size."""
    expected, memory = tokens(serving), serving.offered_weights()
    first, second = (
        part for part in memory.parts if ".experts.0.gate_proj" in part.name or ".experts.1.gate_proj" in part.name
    )
    wrong = TensorPart(first.name, second.address, first.num_bytes, first.dim, first.start, first.size)
    parts = (wrong, *(part for part in memory.parts if part is not first))
    source = connector.offer_weights(OfferedMemory(memory.regions, parts))
    try:
        with caplog.at_level("INFO"):
            assert read_from(source, checkpoint) == expected
    finally:
        source.close()
    assert f"{first.name} from a peer is corrupted" in caplog.text
    assert f"weights: {len(parts) - 1} tensors" in caplog.text
    known = known_digests(checkpoint)
    assert known is not None
    assert {part.name for part in parts} < known.tensors.keys()


def test_parts_that_do_not_make_up_a_tensor_are_not_used() -> None:
    rank = RankWeights("a", b"", "cpu", 0, ())
    upper, lower = TensorPart("t", 1000, 32, 0, 0, 2), TensorPart("t", 2000, 32, 0, 2, 2)
    pairs = [(rank, lower), (rank, upper), (rank, upper)]
    assert [(each.part, each.offset) for each in cover(pairs, (4, 4), 64)] == [(upper, 0), (lower, 32)]
    assert cover([(rank, lower)], (4, 4), 64) == ()
    assert cover([(rank, upper)], (4, 4), 64) == ()
    assert cover(pairs, (4, 4), 128) == ()
    assert cover([(rank, TensorPart("t", 1000, 64, 5, 0, 4))], (4, 4), 64) == ()
