"""Link failures between hosts under load: detection time, longest wait of a client, and time until reconnected.

    python bench/links.py                   every fault, three times each
    python bench/links.py --times 1

Needs root on Linux, kubectl, and the test dependencies (pip install -e '.[dev]'). The pods of the overlay multi-node
run on this machine, each in its own network namespace (tests/hosts/cluster.py), with a random checkpoint on the CPU.
Each fault lasts 8 s. Clients stream meanwhile, one request at a time each; their answers are compared with those of the
undisturbed cluster. Prints a Markdown table of the worst times:

    noticed     from the fault until the detecting process reports it
    waited      longest time without a token at any client, also before its first token
    connected   from healing until all nodes are connected again

Exits with status 1 if a client received an error or a different answer, or if a block is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from answers import sse_lines
from checkpoints import make_checkpoint
from client_load import VOCABULARY
from cluster import Cluster
from fleet import add_tokenizer
from network import require_namespaces
from traffic import check_recovered, nodes_ready

CLIENTS = 4
PROMPT = 1000  # tokens
ANSWER = 60  # tokens
# Processes that detect a fault.
PEERS = "D"
ROUTER = "router"
LIMIT = 30.0  # seconds


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable[[Cluster], None]
    noticed_by: str = ""
    lasts: float = 8.0  # seconds


def pods(cluster: Cluster, role: str, count: int | None = None) -> list[str]:
    return [pod.name for pod in cluster.running_pods(role)][:count]


def isolate(cluster: Cluster, role: str) -> None:
    (name,) = pods(cluster, role, 1)
    cluster.network.partition([name], [pod for pod in cluster.network.names if pod not in (name, "machine")])


def partition(source: str, target: str, count: int | None = None, both_ways: bool = True) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.network.partition(pods(cluster, source), pods(cluster, target, count), both_ways)


def delay(seconds: float) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.network.delay([*cluster.pods], [*cluster.pods], seconds)


FAULTS = (
    Fault("none", lambda cluster: None),
    Fault("all D – all P, silently", partition("decode", "prefill"), PEERS),
    Fault("… only from D to P", partition("decode", "prefill", both_ways=False), PEERS),
    Fault("… only from P to D", partition("prefill", "decode", both_ways=False), PEERS),
    Fault("a P – all others, silently", lambda cluster: isolate(cluster, "prefill"), ROUTER),
    Fault("a P's link is down", lambda cluster: cluster.network.unplug(*pods(cluster, "prefill", 1)), ROUTER),
    Fault("router – a D, silently", partition("router", "decode", 1), ROUTER),
    Fault("… only from the router to D", partition("router", "decode", 1, both_ways=False), ROUTER),
    Fault("a D – all others, silently", lambda cluster: isolate(cluster, "decode"), ROUTER),
    Fault("a D's link is down", lambda cluster: cluster.network.unplug(*pods(cluster, "decode", 1)), ROUTER),
    Fault("50 ms on every link between pods", delay(0.05)),
    Fault("200 ms on every link between pods", delay(0.2)),
)


@dataclass
class Clients:
    """Clients in a thread with one event loop; ``longest`` is the longest wait for a token in seconds."""

    cluster: Cluster
    prompts: list[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    longest: float = 0.0
    answers: int = 0
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.longest = 0.0
        self.answers = 0
        stopping = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(stopping)))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    async def record_expected(self) -> None:
        async with self._client() as client:
            self.expected = [await self._complete(client, prompt) for prompt in self.prompts]

    async def _run(self, stopping: threading.Event) -> None:
        async def repeat(rng: random.Random) -> None:
            while not stopping.is_set():
                index = rng.randrange(len(self.prompts))
                try:
                    tokens = await self._complete(client, self.prompts[index])
                except (httpx.HTTPError, KeyError) as exc:
                    self.failures.append(f"{type(exc).__name__}: {exc}")
                    continue
                self.answers += 1
                if tokens != self.expected[index]:
                    self.failures.append(f"{tokens} is not {self.expected[index]}")

        async with self._client() as client:
            await asyncio.gather(*(repeat(random.Random(seed)) for seed in range(CLIENTS)))

    def _client(self) -> httpx.AsyncClient:
        kept: dict[str, Any] = {"trust_env": False, "timeout": 60.0, "headers": self.cluster.headers}
        return httpx.AsyncClient(base_url=self.cluster.url, **kept)

    async def _complete(self, client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body: dict[str, Any] = {"model": self.cluster.model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True, "cache_salt": str(random.random())}
        tokens: list[int] = []
        last = time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in sse_lines(response):
                if line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    self.longest = max(self.longest, time.monotonic() - last)
                    last = time.monotonic()
        return tokens


def is_noticed(cluster: Cluster, fault: Fault) -> bool:
    if fault.noticed_by == PEERS:
        return not any(decode.describe().connected_peers for decode in cluster.running_pods("decode"))
    return sum(nodes_ready(cluster).values()) < 4


def is_connected(cluster: Cluster) -> bool:
    peers = [decode.describe().connected_peers for decode in cluster.running_pods("decode")]
    return sum(nodes_ready(cluster).values()) == 4 and all(len(connected) == 2 for connected in peers)


def measure(cluster: Cluster, clients: Clients, fault: Fault) -> tuple[float, float, float]:
    """Inject a fault under load and heal it; return the seconds noticed, waited and connected."""
    with clients.running():
        time.sleep(1.0)
        injected = time.monotonic()
        fault.inject(cluster)
        noticed = 0.0
        if fault.noticed_by:
            cluster.wait_until(lambda: is_noticed(cluster, fault), LIMIT)
            noticed = time.monotonic() - injected
        time.sleep(max(0.0, injected + fault.lasts - time.monotonic()))
        healed = time.monotonic()
        cluster.network.heal()
        cluster.wait_until(lambda: is_connected(cluster), LIMIT)
        connected = time.monotonic() - healed
        time.sleep(1.0)
    check_recovered(cluster)
    return noticed, clients.longest, connected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, metavar="N")
    args = parser.parse_args()
    require_namespaces()
    rng = random.Random(1)
    prompts = [rng.choices(range(3, VOCABULARY), k=PROMPT) for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        model = add_tokenizer(make_checkpoint(Path(folder) / "model", "qwen3", vocab_size=VOCABULARY))
        with Cluster("multi-node", Path(folder) / "hosts", model) as cluster:
            cluster.wait_ready()
            clients = Clients(cluster, prompts)
            asyncio.run(clients.record_expected())
            print("| fault | noticed, s | waited, s | connected, s | answers |\n|---|---|---|---|---|", flush=True)
            for fault in FAULTS:
                runs = [(*measure(cluster, clients, fault), clients.answers) for _ in range(args.times)]
                worst = [max(run[index] for run in runs) for index in range(3)]
                cells = [f"{worst[0]:.1f}" if fault.noticed_by else "–", *(f"{seconds:.1f}" for seconds in worst[1:])]
                print(f"| {fault.name} | {' | '.join(cells)} | {sum(run[3] for run in runs)} |", flush=True)
    for failure in clients.failures[:5]:
        print(failure, file=sys.stderr)
    return 1 if clients.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
