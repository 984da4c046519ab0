"""Tensors that a runner reads from the memory of another one, over NIXL: exact, checked, and no more than offered."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from msgspec.structs import replace
from stepper import Stepper

import connector
import runner
from pdserve.checkpoint.weight_digests import checkpoint_digests, known_digests
from pdserve.checkpoint.weight_files import read_headers
from pdserve.protocols import ModelRunner, WeightReader, WeightSource
from pdserve.weights.sharing import OfferedMemory, PartRead, RankWeights, TensorPart, WeightPeer, cover
from runner.loading import offered_weights

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
    expected = tokens(serving)
    memory = serving.offered_weights()
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
    digests = known_digests(checkpoint)
    assert digests is not None
    assert {part.name for part in parts} < digests.tensors.keys()


def test_rows_whose_order_alternates_are_read_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated parts of queries and of latents are; what keys and values are projected by is not."""
    monkeypatch.setattr(offered_weights, "_MOST_RUNS", 4)
    checkpoint = make_checkpoint(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    while known_digests(checkpoint) is None:  # files of the last moment are not cached
        checkpoint_digests(checkpoint)
    serving = runner.build(node_config(checkpoint), lambda stage, fraction: None)
    expected = tokens(serving)
    memory = serving.offered_weights()
    offered = {part.name.rsplit(".", 2)[1] for part in memory.parts if ".self_attn." in part.name}
    assert "kv_b_proj" in offered
    assert not offered & {"q_b_proj", "kv_a_proj_with_mqa"}
    source = connector.offer_weights(memory)
    try:
        assert read_from(source, checkpoint) == expected
    finally:
        source.close()
        serving.close()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_rows_of_gated_delta_nets_are_read_in_runs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without oneDNN, linear weights stay in memory as they were loaded, as on a GPU: then no tensor is read here."""
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    checkpoint = make_checkpoint(tmp_path / "model", family)
    while (digests := known_digests(checkpoint)) is None:  # files of the last moment are not cached
        checkpoint_digests(checkpoint)
    serving = runner.build(node_config(checkpoint), lambda stage, fraction: None)
    expected = tokens(serving)
    memory = serving.offered_weights()
    names = [part.name for part in memory.parts]
    merged = "layers.0.linear_attn.in_proj_qkvz.weight"
    assert any(name.endswith(merged) for name in names) == (family == "qwen3_next")
    assert len(names) > len(set(names)) or family != "qwen3_next"
    source = connector.offer_weights(memory)
    try:
        with caplog.at_level("INFO"):
            assert read_from(source, checkpoint) == expected
    finally:
        source.close()
        serving.close()
    assert set(names) == digests.tensors.keys()
    num_bytes = sum(
        tensor.end - tensor.begin for header in read_headers(checkpoint).values() for tensor in header.values()
    )
    assert f"weights: {len(digests.tensors)} tensors, {num_bytes} B from a peer" in caplog.text


Lie = Callable[[RankWeights], RankWeights]


def every_part(**values: int) -> Lie:
    """Return a lie about all parts."""
    return lambda rank: replace(rank, parts=tuple(replace(part, **values) for part in rank.parts))


def add_huge_part(rank: RankWeights) -> RankWeights:
    """Tell that the largest tensor of the offer has 2^62 bytes; only other tensors can then be read."""
    return replace(rank, parts=(*rank.parts, replace(rank.parts[0], num_bytes=1 << 62)))


def swap_addresses(rank: RankWeights) -> RankWeights:
    addresses = [part.address for part in rank.parts]
    parts = zip(rank.parts, reversed(addresses), strict=True)
    return replace(rank, parts=tuple(replace(part, address=address) for part, address in parts))


LIES: dict[str, Lie] = {
    "a part of 2^62 bytes": add_huge_part,
    "parts of 2^62 bytes": every_part(num_bytes=1 << 62),
    "parts without bytes": every_part(num_bytes=0),
    "no size": every_part(size=0),
    "a size of 2^62": every_part(size=1 << 62),
    "a start of 2^62": every_part(start=1 << 62),
    "another dimension": every_part(dim=1 << 31),
    "addresses of nothing": every_part(address=1 << 20),
    "the last address": every_part(address=(1 << 64) - 1),
    "addresses of other tensors": swap_addresses,
    "metadata of nothing": lambda rank: replace(rank, metadata=b""),
    "garbage as metadata": lambda rank: replace(rank, metadata=b"garbage" * 100),
    "metadata that is cut": lambda rank: replace(rank, metadata=rank.metadata[: len(rank.metadata) // 2]),
    "the name of another agent": lambda rank: replace(rank, agent="another"),
    "a GPU": lambda rank: replace(rank, device="cuda"),
    "another device": lambda rank: replace(rank, device_id=(1 << 32) - 1),
    "a device of no kind": lambda rank: replace(rank, device="\0"),
    "no parts": lambda rank: replace(rank, parts=()),
}


def test_a_lie_of_a_peer_costs_neither_the_start_nor_an_answer(serving: ModelRunner, checkpoint: Path) -> None:
    expected = tokens(serving)
    source = connector.offer_weights(serving.offered_weights())
    try:
        for name, lie in LIES.items():
            assert read_from(Liar(lie(source.offer)), checkpoint) == expected, name
    finally:
        source.close()


class Liar(NamedTuple):
    """A source that offers something else than it has."""

    offer: RankWeights

    def close(self) -> None: ...


class EndingReader:
    """A reader that calls ``end`` before its tenth tensor."""

    def __init__(self, reader: WeightReader, end: Callable[[], None]) -> None:
        self.peer = reader.peer
        self.open = reader.open
        self.close = reader.close
        self._reader = reader
        self._end = end
        self._count = itertools.count(1)

    @property
    def drained(self) -> bool:
        return self._reader.drained

    def read(self, reads: Sequence[PartRead]) -> None:
        if next(self._count) == 10:
            self._end()
        self._reader.read(reads)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_a_peer_that_ends_half_way_costs_no_weights(
    serving: ModelRunner,
    checkpoint: Path,
    end: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The peer is a process of its own. Reads go over TCP: reads of shared memory succeed without a live peer."""
    expected = tokens(serving)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = [sys.executable, str(Path(__file__).parent / "weight_source.py"), str(checkpoint)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process, caplog.at_level("INFO"):
        try:
            assert process.stdout is not None
            peer = WeightPeer("a peer", (msgspec.json.decode(process.stdout.readline(), type=RankWeights),))
            reader = EndingReader(connector.weight_reader(peer), lambda: process.send_signal(end))
            built = runner.build(node_config(checkpoint), lambda stage, fraction: None, reader=reader)
        finally:
            process.kill()
    assert tokens(built) == expected
    built.close()
    assert "the other tensors come from the disk" in caplog.text
    assert "weights: 9 tensors" in caplog.text


def test_parts_that_do_not_make_up_a_tensor_are_not_used() -> None:
    rank = RankWeights("a", b"", "cpu", 0, ())
    upper = TensorPart("t", 1000, 32, 0, 0, 2)
    lower = TensorPart("t", 2000, 32, 0, 2, 2)
    pairs = [(rank, lower), (rank, upper), (rank, upper)]
    assert [(read.part, read.offset) for read in cover(pairs, (4, 4), 64)] == [(upper, 0), (lower, 32)]
    assert cover([(rank, lower)], (4, 4), 64) == ()
    assert cover([(rank, upper)], (4, 4), 64) == ()
    assert cover(pairs, (4, 4), 128) == ()
    assert cover([(rank, TensorPart("t", 1000, 64, 5, 0, 4))], (4, 4), 64) == ()
