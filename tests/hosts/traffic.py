"""Clients of a cluster that must get the expected answers during faults, and the checks after a fault."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from client_load import Load, new_body
from cluster import Cluster
from node_client import RouterClient, greedy

CLIENTS = 4
THINK = 0.2  # seconds: faults take seconds to be detected, and the whole cluster shares this machine meanwhile
LONGEST_PROMPT = 1500  # tokens
LONGEST_ANSWER = 60  # tokens
RELEASE_SECONDS = 10.0  # until no node holds a block for a request that has ended
PROMPT = random.Random(5).choices(range(3, 4096), k=200)


class Traffic:
    """Random requests; their expected answers come from the undisturbed cluster."""

    def __init__(self, cluster: Cluster, seed: int, count: int) -> None:
        rng = random.Random(seed)
        bodies = [new_body(rng, LONGEST_PROMPT, LONGEST_ANSWER) | {"model": cluster.model} for _ in range(count)]
        self._cluster = cluster
        self._load = Load(bodies, headers=cluster.headers)
        asyncio.run(self._load.record_expected(cluster.url, rng))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Repeat the requests while the context is open; then check that every answer was exact."""
        load = Load(self._load.bodies, self._load.expected, headers=self._cluster.headers, think=THINK)
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(load, stopping))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
        assert not load.failures, f"{len(load.failures)} of {load.outcomes}: {load.failures[0]}"
        assert load.outcomes["exact"] >= CLIENTS

    def _run(self, load: Load, stopping: threading.Event) -> None:
        seed = 0
        while not stopping.is_set():
            asyncio.run(load.run(self._cluster.url, CLIENTS, seconds=0.5, seed=(seed := seed + CLIENTS)))


def check_recovered(cluster: Cluster) -> None:
    """Check that all nodes are idle, every P hands off to every D with exact tokens, and all blocks are free again."""
    cluster.wait_connected(20.0)
    for node in cluster.nodes:
        node.wait_idle(RELEASE_SECONDS)
    for decode in cluster.running_pods("decode"):
        failures = decode.counter("handoff_failures")
        handoffs = decode.counter("handoffs")
        with RouterClient(decode.address) as client:
            tokens = [
                client.generate(PROMPT, greedy(8), prefill.name, cache_salt=uuid.uuid4().hex).tokens
                for prefill in cluster.running_pods("prefill")
            ]
            tokens.append(client.generate(PROMPT, greedy(8), cache_salt=uuid.uuid4().hex).tokens)
        assert all(answer == tokens[-1] for answer in tokens), "tokens after a handoff differ from D's own"
        assert decode.counter("handoffs") == handoffs + len(cluster.running_pods("prefill"))
        assert decode.counter("handoff_failures") == failures, decode.log.read_text()[-2000:]
    for node in cluster.nodes:
        node.wait_idle(RELEASE_SECONDS)
    cluster.wait_until(lambda: nodes_ready(cluster) == {"prefill": 2, "decode": 2}, 20.0)


def nodes_ready(cluster: Cluster) -> dict[str, int]:
    """Return the numbers of ready nodes that the router reports, by role."""
    router = cluster.running_pods("router")[0]
    lines = httpx.get(f"http://{router.metrics}/metrics", trust_env=False).text.splitlines()
    series = [line for line in lines if line.startswith("pdserve_nodes_ready{")]
    return {role: sum(int(float(line.split()[-1])) for line in series if f'role="{role}"' in line) for role in ROLES}


def wait(seconds: float) -> None:
    """Let traffic run."""
    time.sleep(seconds)


ROLES = ("prefill", "decode")
