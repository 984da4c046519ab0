"""Interfaces that gateways, schedulers and dashboards of other projects use, on a fleet of two P and two D."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import httpx
import psutil
import pytest
from exposition import scrape
from fleet import MODEL_NAME, Fleet, NodeProcess, copy_without_weights
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


def post(
    cluster: Cluster, tokens: list[int], headers: dict[str, str], max_tokens: int = 2, url: str = ""
) -> httpx.Response:
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"model": MODEL_NAME, "prompt": tokens, **fields}
    return httpx.post(f"{url or cluster.fleet.url}/v1/completions", json=body, headers=headers, timeout=patience(30.0))


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
        assert {block.kind for block in reader.copy.blocks.values()} <= {"full_attention"}
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


# ---------------------------------------------------------------- a node as an OpenAI server


@pytest.fixture(scope="module")
def http_node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> NodeProcess:
    model = copy_without_weights(tmp_path_factory.mktemp("http"))
    peers = [word for node in cluster.fleet.prefill for word in ("--prefill", node.address)]
    return cluster.fleet.start_http_node("decode", model, [*NODE, *peers, "--trust-routing-headers"])


def test_decode_node_serves_the_openai_protocol_itself(cluster: Cluster, http_node: NodeProcess) -> None:
    url = f"http://{http_node.address}"
    tokens = prompt(40 * BLOCK, 200)
    assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == [MODEL_NAME]
    assert httpx.get(f"{url}/health").status_code == 200
    expected = post(cluster, tokens, {}, max_tokens=6).json()["choices"][0]["token_ids"]
    for node in cluster.fleet.prefill:
        answer = post(cluster, tokens, {"x-prefiller-host-port": node.address}, max_tokens=6, url=url)
        assert answer.json()["choices"][0]["token_ids"] == expected
        assert unquote(answer.headers["x-pdserve-prefill-node"]) in ("", node.address)
        tokens = prompt(40 * BLOCK, 201)
        expected = post(cluster, tokens, {}, max_tokens=6).json()["choices"][0]["token_ids"]
    assert post(cluster, tokens, {"x-prefiller-host-port": "10.9.9.9:1"}, url=url).status_code == 400
    body = {"prompt": [5], "kv_transfer_params": {"do_remote_decode": True}}
    refused = httpx.post(f"{url}/v1/completions", json=body)
    assert "x-prefiller-host-port" in refused.json()["error"]["message"]


def test_http_port_of_a_node_has_its_metrics_with_types(http_node: NodeProcess) -> None:
    families = {family.name: family for family in scrape(f"http://{http_node.address}/metrics")}
    assert families["vllm:num_requests_waiting"].type == "gauge"
    assert families["vllm:prefix_cache_queries_total"].type == "counter"
    assert families["vllm:request_prefill_time_seconds"].type == "histogram"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    (config,) = families["vllm:cache_config_info"].samples
    assert (config.labels["block_size"], config.labels["model_name"]) == (str(BLOCK), MODEL_NAME)


def router_beside(node: NodeProcess) -> int | None:
    """Return the process id of the router beside a node; None while there is none."""
    for child in psutil.Process(node.pid).children():
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "router" in child.cmdline():
                return int(child.pid)
    return None


def test_router_beside_a_node_starts_again_and_both_drain(cluster: Cluster, http_node: NodeProcess) -> None:
    first = router_beside(http_node)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    cluster.fleet.wait_until(lambda: router_beside(http_node) not in (None, first), 20.0)
    http_node.signal(signal.SIGTERM)
    http_node.wait_ended(20.0)
    assert http_node.child.process.returncode == 0


@pytest.mark.slow
def test_server_that_cannot_start_ends_the_node(cluster: Cluster, tmp_path: Path) -> None:
    model = copy_without_weights(tmp_path)
    argv = [sys.executable, "-m", "cli", "decode", str(model), *NODE, "--http", "0", "--api-keys", "/no/such/keys"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience(60.0))
    assert done.returncode == 2
    assert "/no/such/keys" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_elastic_node_serves_itself_and_has_prompts_computed_by_the_others(tmp_path: Path) -> None:
    model = copy_without_weights(tmp_path)
    with Fleet() as fleet:
        other = fleet.start_both(model, tmp_path / "nodes", NODE)
        node = fleet.start_http_node("serve", model, [*NODE, "--prefill", other.address, "--trust-routing-headers"])
        fleet.wait_ready()
        url = f"http://{node.address}"
        headers = {"x-prefiller-host-port": other.address}
        fields = {"model": MODEL_NAME, "max_tokens": 4, "ignore_eos": True}
        for seed in range(4):
            body = {"prompt": prompt(40 * BLOCK, seed), **fields}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=patience(30.0))
            assert unquote(answer.headers["x-pdserve-decode-node"]) != other.address
        assert other.counter("leases_granted") > 0
        assert other.counter("decode_requests") == 0


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
    prefixes = sorted(block.tokens or () for block in reader.copy.blocks.values())
    assert prefixes == [tuple(tokens[: BLOCK * count]) for count in range(1, 5)]
