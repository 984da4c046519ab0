"""Nodes that load weights from the memory of a peer: any ranks, unlike checkpoints, damage, and a peer's death."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from checkpoints import change_weight, make_checkpoint
from fleet import Fleet, NodeProcess
from machine import patience
from node_client import RouterClient, greedy

from pdserve.checkpoint.weight_digests import fold_digests, known_digests
from pdserve.config.compatibility import WEIGHTS_OF, weights_hash
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

PROMPT = random.Random(1).choices(range(3, 128), k=30)
OFFER = ("--load-from", "auto", "--max-num-seqs", "8", "--max-batch-tokens", "64")
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
SPLITS = {"1": (), "tp2": ("--tp", "2"), "pp2": ("--pp", "2"), "2x2": ("--pp", "2", "--tp", "2")}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Experts are in memory as they are stored, also on a CPU."""
    return make_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)


def start_peer(fleet: Fleet, checkpoint: Path, *flags: str) -> NodeProcess:
    """Start a node that loads from the disk, and caches the digests beside the checkpoint."""
    peer = fleet.start_decode(checkpoint, [*OFFER, *flags])
    fleet.wait_ready()
    assert "from the disk" not in peer.output  # this node asked no peer
    return peer


def start_reader(fleet: Fleet, checkpoint: Path, peer: NodeProcess, *flags: str) -> NodeProcess:
    return fleet.start_decode(checkpoint, [*OFFER, "--weight-peers", peer.address, *flags])


def tokens(node: NodeProcess) -> list[int]:
    with RouterClient(node.address) as client:
        return client.generate(PROMPT, greedy(12), "").tokens


def tensors_from_peer(node: NodeProcess) -> list[int]:
    """Return the numbers of tensors that the node's ranks have read from a peer."""
    return [int(number) for number in re.findall(r"weights: (\d+) tensors", node.output)]


def offered(peer: NodeProcess, checkpoint: Path) -> dict[str, pb.OfferedTensor]:
    digests = known_digests(checkpoint)
    assert digests is not None
    fields = {f"{WEIGHTS_OF}{group}": digest for group, digest in fold_digests(digests.tensors).items()}
    fields["weights"] = "checkpoint"
    with peer.channel() as channel:
        messages = pb_grpc.WeightsStub(channel).Offer(
            pb.OfferRequest(weights_hash=weights_hash(fields)), timeout=patience(5.0)
        )
        return {tensor.name: tensor for message in messages for tensor in message.tensors}


@pytest.mark.slow
@pytest.mark.parametrize(("there", "here"), [("1", "1"), ("1", "tp2"), ("tp2", "1"), ("tp2", "pp2"), ("pp2", "tp2")])
def test_node_reads_the_tensors_of_a_peer_with_any_ranks(there: str, here: str, checkpoint: Path) -> None:
    with Fleet() as fleet:
        peer = start_peer(fleet, checkpoint, *SPLITS[there])
        node = start_reader(fleet, checkpoint, peer, *SPLITS[here])
        fleet.wait_ready()
        read = tensors_from_peer(node)
        assert len(read) == (2 if here != "1" else 1)
        assert all(count >= 8 * 3 for count in read), node.output  # at least the experts of a layer
        assert "corrupted" not in node.output
        assert tokens(node) == tokens(peer)


@pytest.mark.slow
@pytest.mark.parametrize(("there", "here"), [("tp2", "1"), ("pp2", "tp2")])
def test_node_reads_the_reordered_tensors_of_gated_delta_nets(there: str, here: str, tmp_path: Path) -> None:
    """On a CPU these are the convolutions: a shard has rows of queries, of keys and of values."""
    kinds = ["linear_attention", "full_attention"] * 2
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_next", num_hidden_layers=4, layer_types=kinds)
    with Fleet() as fleet:
        peer = start_peer(fleet, checkpoint, *SPLITS[there])
        offers = offered(peer, checkpoint)
        assert "model.layers.0.linear_attn.conv1d.weight" in offers
        node = start_reader(fleet, checkpoint, peer, *SPLITS[here])
        fleet.wait_ready()
        read = tensors_from_peer(node)
        assert max(read) == len(offers)
        assert "corrupted" not in node.output
        assert tokens(node) == tokens(peer)


@pytest.mark.slow
def test_peer_with_another_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3_moe", num_hidden_layers=2)
    change_weight(other, EXPERT)
    with Fleet() as fleet:
        alone = start_peer(fleet, other)  # caches the digests
        peer = start_peer(fleet, checkpoint)
        node = start_reader(fleet, other, peer)
        fleet.wait_ready()
        assert "has another checkpoint" in node.output
        assert tensors_from_peer(node) == []
        assert tokens(node) == tokens(alone)


@pytest.mark.slow
def test_corrupted_tensor_is_found_and_read_from_the_disk(checkpoint: Path) -> None:
    with Fleet() as fleet:
        peer = start_peer(fleet, checkpoint)
        expected = tokens(peer)
        damaged = offered(peer, checkpoint)[EXPERT]
        (engine,) = peer.processes("engine")
        with open(f"/proc/{engine.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(damaged.address + damaged.num_bytes // 2)
            memory.write(os.urandom(8))
        node = start_reader(fleet, checkpoint, peer)
        fleet.wait_ready()
        assert f"{EXPERT} from {peer.address} is corrupted" in node.output
        assert tensors_from_peer(node) == [len(offered(peer, checkpoint)) - 1]
        assert tokens(node) == expected


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "hung"])
def test_peer_that_fails_during_the_load_costs_no_weights(end: str, checkpoint: Path) -> None:
    """The peer's engine is stopped, so reads over TCP stand still; then the peer dies, or the reader gives up."""
    over_tcp = {"UCX_TLS": "tcp"}
    with Fleet() as fleet:
        peer = fleet.start_decode(checkpoint, [*OFFER, "--peer-timeout", "120"], over_tcp)  # peer stays "ready"
        fleet.wait_ready()
        expected = tokens(peer)
        peer.stop("engine")
        timeout = "600" if end == "killed" else "2"
        flags = [*OFFER, "--weight-peers", peer.address, "--peer-timeout", timeout]
        node = fleet.start_decode(checkpoint, flags, over_tcp)
        fleet.wait_until(lambda: "weights are read from" in node.output, 60.0)
        if end == "killed":
            peer.signal_engine(9)
            peer.wait_ended(10.0)
        fleet.wait_until(lambda: "the other tensors come from the disk" in node.output, 60.0)
        fleet.wait_until(lambda: node.child.state == "ready", 60.0)
        assert tokens(node) == expected
