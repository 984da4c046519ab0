"""Clients of a cluster, which must not notice what happens to it, and what has to hold when it is over."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from cluster import Cluster
from node_client import RouterClient, greedy
from sabotage import Load, new_body

CLIENTS = 4
LONGEST_PROMPT, LONGEST_ANSWER = 1500, 60  # tokens
GIVEN_BACK = 10.0  # seconds after which nobody holds a block for a request that has ended, however it did
PROMPT = random.Random(5).choices(range(3, 4096), k=200)


class Traffic:
    """Asks each of some requests of the undisturbed cluster first."""

    def __init__(self, cluster: Cluster, seed: int, count: int) -> None:
        chance = random.Random(seed)
        bodies = [new_body(chance, LONGEST_PROMPT, LONGEST_ANSWER) | {"model": cluster.model} for _ in range(count)]
        self._cluster = cluster
        self._load = Load(bodies, headers=cluster.headers)
        asyncio.run(self._load.learn(cluster.url, chance))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clients repeat the requests meanwhile; at its end every answer was the known one, and many there were."""
        load = Load(self._load.bodies, self._load.expected, headers=self._cluster.headers)
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(load, stopping))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
        assert not load.wrong, f"{len(load.wrong)} of {load.outcomes}: {load.wrong[0]}"
        assert load.outcomes["exact"] >= CLIENTS

    def _run(self, load: Load, stopping: threading.Event) -> None:
        seed = 0
        while not stopping.is_set():
            asyncio.run(load.run(self._cluster.url, CLIENTS, seconds=0.5, seed=(seed := seed + CLIENTS)))


def check_as_before(cluster: Cluster) -> None:
    """Nothing is left of what was; each D has a prompt handed over by each P, and gives everything back."""
    cluster.wait_connected(20.0)
    for node in cluster.nodes:
        node.wait_idle(GIVEN_BACK)
    for decode in cluster.of("decode"):
        failures, handoffs = decode.counter("handoff_failures"), decode.counter("handoffs")
        with RouterClient(decode.address) as client:
            tokens = [
                client.generate(PROMPT, greedy(8), prefill.name, cache_salt=uuid.uuid4().hex).tokens
                for prefill in cluster.of("prefill")
            ]
            tokens.append(client.generate(PROMPT, greedy(8), cache_salt=uuid.uuid4().hex).tokens)
        assert all(each == tokens[-1] for each in tokens), "what was handed over is not what D computes itself"
        assert decode.counter("handoffs") == handoffs + len(cluster.of("prefill"))
        assert decode.counter("handoff_failures") == failures, decode.log.read_text()[-2000:]
    for node in cluster.nodes:
        node.wait_idle(GIVEN_BACK)
    cluster.wait_until(lambda: nodes_ready(cluster) == {"prefill": 2, "decode": 2}, 20.0)


def nodes_ready(cluster: Cluster) -> dict[str, int]:
    """As the router knows them."""
    lines = httpx.get(f"{cluster.url}/metrics", trust_env=False).text.splitlines()
    found = [line for line in lines if line.startswith("pdserve_nodes_ready{")]
    return {role: sum(int(float(line.split()[-1])) for line in found if f'role="{role}"' in line) for role in ROLES}


def wait(seconds: float) -> None:
    """Let traffic run."""
    time.sleep(seconds)


ROLES = ("prefill", "decode")
