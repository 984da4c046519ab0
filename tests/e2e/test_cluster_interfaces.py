"""Interfaces that gateways, schedulers and dashboards of other projects use, on a fleet of two P and two D."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from fleet import MODEL_NAME, Fleet, copy_without_weights
from kv_event_reader import EventReader
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL

BLOCK = 16
NODE = ["--engine", "simulated", "--block-size", str(BLOCK)]


class Cluster:
    """Two prefill nodes, two decode nodes and a router, with the folder of their sockets for KV events."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self._folder = folder

    def start(self, model: Path) -> None:
        for index in range(2):
            self.fleet.start_prefill(model, [*NODE, *self._events(f"prefill-{index}")])
        for index in range(2):
            self.fleet.start_decode(model, [*NODE, *self._events(f"decode-{index}")])
        self.fleet.start_router(model, ["--policy", "prefix-aware", "--trust-routing-headers"])
        self.fleet.wait_ready()

    def reader(self, name: str) -> EventReader:
        return EventReader(*self._endpoints(name))

    def _endpoints(self, name: str) -> tuple[str, str]:
        return f"ipc://{self._folder}/{name}", f"ipc://{self._folder}/{name}-replays"

    def _events(self, name: str) -> list[str]:
        live, replays = self._endpoints(name)
        return ["--kv-events-endpoint", live, "--kv-events-replay-endpoint", replays]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = copy_without_weights(tmp_path_factory.mktemp("model"))
    with Fleet() as fleet:
        cluster = Cluster(fleet, tmp_path_factory.mktemp("kv"))
        cluster.start(model)
        yield cluster


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=num_tokens)


def post(cluster: Cluster, tokens: list[int], headers: dict[str, str], max_tokens: int = 2) -> httpx.Response:
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    body = {"model": MODEL_NAME, "prompt": tokens, **fields}
    return httpx.post(f"{cluster.fleet.url}/v1/completions", json=body, headers=headers, timeout=patience(30.0))


def test_kv_events_of_p_and_d_have_the_blocks_of_a_request_once(cluster: Cluster) -> None:
    tokens = prompt(40 * BLOCK + 3, seed=1)
    answer = post(cluster, tokens, {"x-prefiller-host-port": cluster.fleet.prefill[0].address}, max_tokens=20)
    output = answer.json()["choices"][0]["token_ids"]
    blocks = {}
    for node in cluster.fleet.nodes:
        reader = cluster.reader(node.name)
        numbers = reader.replay(0)
        assert numbers == list(range(len(numbers)))
        blocks[node.name] = len(reader.copy.blocks)
        assert {known.kind for known in reader.copy.blocks.values()} <= {"full_attention"}
        for end in range(BLOCK, BLOCK * blocks[node.name] + 1, BLOCK):
            assert reader.copy.groups_with([*tokens, *output][:end]) == {0}
        reader.close()
    whole = (len(tokens) + len(output) - 1) // BLOCK
    assert sorted(blocks.values()) == [0, 0, len(tokens) // BLOCK, whole]


def test_gateway_chooses_the_prefill_node(cluster: Cluster) -> None:
    for seed, node in enumerate(cluster.fleet.prefill * 3, start=100):
        headers = {"x-prefiller-host-port": f"10.9.9.9:1, {node.address}", "x-request-id": "r-1"}
        answer = post(cluster, prompt(40 * BLOCK, seed), headers)
        assert unquote(answer.headers["x-pdserve-prefill-node"]) == node.describe().node_id
        assert answer.headers["x-request-id"] == "r-1"


def test_nodes_that_discovery_does_not_know_are_refused(cluster: Cluster) -> None:
    for address in ("10.9.9.9:9001", cluster.fleet.decode[0].address, "127.0.0.1:1", "x", "127.0.0.1"):
        answer = post(cluster, [5, 6], {"x-prefiller-host-port": address})
        assert answer.status_code == 400
        assert "no prefill node at" in answer.json()["error"]["message"]


def test_objectives_are_positive_numbers(cluster: Cluster) -> None:
    assert post(cluster, [5, 6], {"x-llm-d-slo-ttft-ms": "50", "x-llm-d-slo-tpot-ms": "9.5"}).status_code == 200
    for value in ("0", "-1", "nan", "inf", "fast"):
        assert post(cluster, [5, 6], {"x-llm-d-slo-tpot-ms": value}).status_code == 400


@pytest.mark.slow
def test_kv_events_of_a_node_with_several_ranks_come_once(tmp_path: Path) -> None:
    endpoints = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replays"
    flags = ["--tp", "2", "--pp", "2", "--block-size", str(BLOCK), "--kv-events-endpoint", endpoints[0]]
    with Fleet() as fleet:
        fleet.start_decode(EMBEDDED_MODEL, [*flags, "--kv-events-replay-endpoint", endpoints[1]], peers=False)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready()
        tokens = prompt(4 * BLOCK + 3, seed=1)
        fleet.complete(tokens, max_tokens=4)
        reader = EventReader(*endpoints)
        reader.replay(0)
        reader.close()
    known = sorted(block.prefix or () for block in reader.copy.blocks.values())
    assert known == [tuple(tokens[: BLOCK * count]) for count in range(1, 5)]
