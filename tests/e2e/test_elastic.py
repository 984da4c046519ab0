"""Nodes that prefill and decode: prompts cross between two of them, and every token is exact."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import Fleet, add_tokenizer
from node_client import RouterClient, greedy

OUTPUT = 16  # tokens
FLAGS = ("--handoff-min-tokens", "1", "--block-size", "16", "--kv-checksum", "on", "--max-model-len", "2048")
PATIENCE = 15.0  # seconds


def start_elastic(model: Path, listed: Path, flags: Sequence[str], router_flags: Sequence[str] = ()) -> Fleet:
    """Start two nodes of both roles, each connected to the other, and a router."""
    fleet = Fleet()
    try:
        for _ in range(2):
            fleet.start_both(model, listed, flags)
        fleet.start_router(model, router_flags)
        fleet.wait_ready()
        fleet.wait_until(lambda: all(node.describe().connected_peers for node in fleet.both), PATIENCE)
    except BaseException:
        fleet.close()
        raise
    return fleet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", num_hidden_layers=2))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with start_elastic(model, tmp_path_factory.mktemp("listed") / "nodes", FLAGS) as fleet:
        yield fleet


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(3, 128), k=rng.randint(2, length)) for _ in range(count)]


def test_crossing_handoffs_are_exact(fleet: Fleet, model: Path) -> None:
    reference = reference_model(model)
    prompts = random_prompts(1, 12, 400)
    first, second = fleet.both
    with RouterClient(first.address) as to_first, RouterClient(second.address) as to_second:
        running = []
        for number, prompt in enumerate(prompts):
            client, peer = ((to_first, second), (to_second, first))[number % 2]
            running.append(client.send(prompt, greedy(OUTPUT), prefill_node=peer.describe().node_id))
        for prompt, request in zip(prompts, running, strict=True):
            assert request.wait().tokens == reference_greedy(reference, prompt, OUTPUT)
    for node in fleet.both:
        assert node.counter("handoffs") == len(prompts) // 2
        assert node.counter("handoff_failures") == 0
        assert node.counter("leases_released") == len(prompts) // 2
        node.wait_idle()


def test_node_leaves_itself_out_of_its_peers(fleet: Fleet) -> None:
    first, second = fleet.both
    for node, other in ((first, second), (second, first)):
        description = node.describe()
        assert (description.role, list(description.connected_peers)) == ("both", [other.describe().node_id])
        assert f"prefill node {node.address}" not in node.output
        assert not any(f'peer="{node.address}"' in name for name in node.status().counters)


def test_router_uses_nodes_of_both_roles(fleet: Fleet, model: Path) -> None:
    reference = reference_model(model)
    prompts = random_prompts(2, 8, 300)
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: fleet.complete(prompt, OUTPUT), prompts))
    assert outputs == [reference_greedy(reference, prompt, OUTPUT) for prompt in prompts]
