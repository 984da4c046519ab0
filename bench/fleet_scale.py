"""Costs of a router and of a decode node by the number of nodes; docs/numbers.md has the results.

    PYTHONPATH=.:tests/support python bench/fleet_scale.py router --nodes 10 100 1000
    PYTHONPATH=.:tests/support python bench/fleet_scale.py choice --nodes 10 100 1000
    PYTHONPATH=.:tests/support python bench/fleet_scale.py peers --nodes 0 10 100

``router``: a real router watches services that act as nodes (bench/many_nodes.py), half of them of each role, first
without and then with requests. CPU is user + system time of the router process, so other work on the machine matters
little; figures per second assume the report rate of busy nodes. ``choice``: the parts of a node choice, measured in
this process. ``peers``: CPU, memory and file handles of a real decode node (simulated engine) by the number of
connected prefill nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import psutil
from fleet import Fleet
from many_nodes import BLOCK_SIZE, MODEL, VOCABULARY, Behaviour, ManyNodes

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.hashing import root_hash, short_block_hashes
from pdserve.request_cost import TYPICAL, RequestLoad
from router.fleet.nodes import REPORTS
from router.fleet.policy import FleetSnapshot, NodeView, PolicyRequest, prefix_aware
from router.fleet.prefix_index import PrefixIndex

MAX_REPORT_RATE = 1000.0  # reports/s of all nodes that a small machine can send beside the measured router
NODE_REPORT_RATE = 50.0  # highest reports/s of a real node
PROMPT = 2048  # tokens


def print_figures(**figures: float | str) -> None:
    print(json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in figures.items()}), flush=True)


def cpu_of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------- a router


@contextmanager
def running_router(nodes: ManyNodes, directory: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Start a router for the nodes; yield its process and URL once it is ready."""
    argv = [sys.executable, "-m", "router", str(EMBEDDED_MODEL), "--served-model-name", MODEL, "--port", "0"]
    for role, addresses in nodes.addresses.items():
        (directory / role).write_text("\n".join(addresses))
        argv += [f"--{role}", f"file://{directory / role}"]
    log = (directory / "log").open("wb")
    with log, subprocess.Popen([*argv, "--status-fd", "1"], stdout=subprocess.PIPE, stderr=log) as router:
        try:
            assert router.stdout is not None
            address = ""
            for line in router.stdout:
                state = json.loads(line)
                address = state.get("address") or address
                if state["state"] == "ready":
                    break
            yield psutil.Process(router.pid), f"http://{address}"
        finally:
            router.terminate()


def measure_router(num_nodes: int, blocks: int, rate: float, seconds: float) -> None:
    reports = min(NODE_REPORT_RATE, MAX_REPORT_RATE / num_nodes)
    nodes = ManyNodes(Behaviour(num_nodes // 2, reports, blocks), num_nodes - num_nodes // 2)
    with tempfile.TemporaryDirectory() as directory:
        try:
            began = time.perf_counter()
            with running_router(nodes, Path(directory)) as (router, url):
                wait_for_all(url, num_nodes)
                ready = time.perf_counter() - began
                starting = cpu_of(router)
                time.sleep(2.0)
                per_report, size = idle_costs(router, nodes, seconds)
                times, per_request = request_costs(router, nodes, url, rate, seconds, per_report)
                print_figures(
                    nodes=num_nodes,
                    start_s=ready,
                    start_cpu_s=starting,
                    rss_mib=router.memory_info().rss / 2**20,
                    us_per_report=1e6 * per_report,
                    reports_per_s=(most := min(NODE_REPORT_RATE * num_nodes, REPORTS)),
                    cores_of_reports=per_report * most,
                    watch_kb_per_s=size * most / 1e3,
                    ms_per_request=1e3 * per_request,
                    first_token_p50_ms=1e3 * median(times),
                    first_token_p99_ms=1e3 * sorted(times)[len(times) * 99 // 100],
                )
        finally:
            nodes.close()


def wait_for_all(url: str, num_nodes: int) -> None:
    """Wait until the router reports all nodes as ready."""
    while True:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("pdserve_nodes_ready{")]
        if sum(float(line.rpartition(" ")[2]) for line in lines) >= num_nodes:
            return
        time.sleep(0.2)


def idle_costs(router: psutil.Process, nodes: ManyNodes, seconds: float) -> tuple[float, float]:
    """Return the router's CPU seconds per report, and the bytes of a report."""
    count, size = nodes.counts()
    cpu = cpu_of(router)
    time.sleep(seconds)
    count_after, size_after = nodes.counts()
    cpu_after = cpu_of(router)
    return (cpu_after - cpu) / (count_after - count), (size_after - size) / (count_after - count)


def request_costs(
    router: psutil.Process, nodes: ManyNodes, url: str, rate: float, seconds: float, per_report: float
) -> tuple[list[float], float]:
    """Return the seconds of each request, and the router's CPU seconds per request, reports excluded."""
    count, _ = nodes.counts()
    cpu = cpu_of(router)
    times = asyncio.run(send_requests(url, rate, seconds))
    count_after, _ = nodes.counts()
    cpu_after = cpu_of(router)
    return times, (cpu_after - cpu - (count_after - count) * per_report) / len(times)


async def send_requests(url: str, rate: float, seconds: float) -> list[float]:
    """Send requests for one token at random times; return the seconds of each."""
    rng = random.Random(3)
    times = list[float]()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

        async def one() -> None:
            prompt = rng.choices(range(300, VOCABULARY), k=PROMPT)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            began = time.perf_counter()
            (await client.post("/v1/completions", json=body)).raise_for_status()
            times.append(time.perf_counter() - began)

        end = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            while time.perf_counter() < end:
                group.create_task(one())
                await asyncio.sleep(rng.expovariate(rate))
    return times


# ---------------------------------------------------------------- a choice


def measure_choice(num_nodes: int, blocks: int) -> None:
    """Measure the choice for a prompt whose first half is cached on a quarter of the nodes."""
    rng = random.Random(4)
    tokens = random.Random(5).choices(range(VOCABULARY), k=PROMPT)
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    hashes = short_block_hashes(packed, BLOCK_SIZE, root_hash(""))
    before = psutil.Process().memory_info().rss
    index = PrefixIndex()
    names = {}
    for number in range(num_nodes):
        cached = index.open(0)
        cached.change([rng.getrandbits(64) for _ in range(blocks)], ())
        if number % 4 == 0:
            cached.change(hashes[: len(hashes) // 2], ())
        names[cached] = f"node-{number}"
    size = psutil.Process().memory_info().rss - before
    roles = ["prefill" if number % 2 else "decode" for number in range(num_nodes)]
    peers = frozenset(f"node-{number}" for number, role in enumerate(roles) if role == "prefill")
    views = tuple(
        NodeView(
            f"node-{number}",
            role,
            MODEL,
            True,
            connected_peers=peers if role == "decode" else frozenset(),
            load=RequestLoad(rng.randrange(64), 0, rng.randrange(20_000), 40_000, 50_000),
            costs=TYPICAL,
        )
        for number, role in enumerate(roles)
    )
    matches = index.match(hashes, names)
    request = PolicyRequest(PROMPT, {names[cached]: count * BLOCK_SIZE for cached, count in matches.items()})
    print_figures(
        nodes=num_nodes,
        hash_ms=1e3 * seconds_of(lambda: short_block_hashes(packed, BLOCK_SIZE, root_hash(""))),
        look_up_ms=1e3 * seconds_of(lambda: index.match(hashes, names)),
        choose_ms=1e3 * seconds_of(lambda: prefix_aware(FleetSnapshot(MODEL, views, 1, TYPICAL), request)),
        bytes_per_block=size / (num_nodes * blocks),
    )


def seconds_of(work: Callable[[], object]) -> float:
    """Return the median CPU time of 30 runs; other processes do not count."""
    times = []
    for _ in range(30):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return median(times)


# ---------------------------------------------------------------- a decode node and its peers


def measure_peers(num_peers: int, seconds: float) -> None:
    nodes = ManyNodes(Behaviour(num_peers, 1.0, 0), 0)
    try:
        with Fleet() as fleet:
            prefills = [word for address in nodes.addresses["prefill"] for word in ("--prefill", address)]
            began = time.perf_counter()
            flags = ["--engine", "simulated", *prefills]
            decode = fleet.start_decode(EMBEDDED_MODEL, flags)
            fleet.wait_until(lambda: len(decode.describe().connected_peers) == num_peers, 120.0)
            ready = time.perf_counter() - began
            frontend = psutil.Process(decode.pid)
            time.sleep(2.0)
            cpu = cpu_of(frontend)
            time.sleep(seconds)
            print_figures(
                peers=num_peers,
                connected_s=ready,
                idle_cores=(cpu_of(frontend) - cpu) / seconds,
                rss_mib=frontend.memory_info().rss / 2**20,
                handles=float(frontend.num_fds()),
            )
    finally:
        nodes.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["router", "choice", "peers"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000], help="prefill nodes, for peers")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks in each node's prefix cache")
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    args = parser.parse_args(argv)
    for number in args.nodes:
        if args.what == "router":
            measure_router(number, args.blocks, args.rate, args.seconds)
        elif args.what == "choice":
            measure_choice(number, args.blocks)
        else:
            measure_peers(number, args.seconds)


if __name__ == "__main__":
    main()
