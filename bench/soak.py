"""Soak test: half an hour of load on a small fleet, during which memory, handles and threads must not grow.

    python bench/soak.py --seconds 1800 --csv soak.csv --plot soak.png

Starts a router, a prefill and a decode node with the embedded model, measures their capacity in requests/s with
closed-loop clients, and then sends ``--load`` of that capacity as a Poisson process. Requests are completions and
chats, streamed or not, with one or two prompts, n, log-probabilities, penalties, grammars and stop strings. All prompts
are new. One client in ten disconnects before the end, one request in fifty is invalid, and one in five uses a new
connection. Needs the test dependencies (pip install -e '.[dev]').

A process keeps the memory of its largest load so far: sockets, buffers, and a matrix product per batch size
(runner/models/layers/linear.py). Without a peak at the start, a moment with a busy machine and many queued requests
would look like a leak. So ``--burst`` closed-loop clients run first.

Memory is USS, which a process would free by ending; handles are open file descriptors. A window is a sixth of the time.
The medians of the second and the last window are compared; in the first one, caches and allocators still grow. Exits
with status 1 if a request failed, a block is lost, or the memory of a process has grown by more than ``--growth``.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from answers import ErrorAnswer, send_completion
from client_load import DISCONNECT_SHARE, new_body
from fleet import MODEL_NAME, Fleet, start_fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL

FLAGS = ("--kv-cache-memory", "256MiB")
MEBIBYTE = 2**20
WINDOWS = 6
INVALID = 0.02
FRESH_CONNECTION = 0.2
CHATS = 0.3
SAMPLED_EVERY = 5.0  # seconds
QUIET_SECONDS = 10.0  # from the last request until all blocks must be free


@dataclass(frozen=True)
class Sample:
    """Resources of one process at one time."""

    at: float  # seconds since the start of the load
    process: str
    memory: float  # MiB
    handles: int
    threads: int


@dataclass
class Traffic:
    """Sends random requests and counts their outcomes."""

    url: str
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    async def closed(self, clients: int, seconds: float) -> float:
        """Run closed-loop clients and return their throughput in requests/s."""
        end = time.monotonic() + seconds
        before = sum(self.outcomes.values())
        async with self._client() as client:

            async def one() -> None:
                while time.monotonic() < end:
                    await self._send(client)

            await asyncio.gather(*(one() for _ in range(clients)))
        return (sum(self.outcomes.values()) - before) / seconds

    async def open(self, rate: float, seconds: float) -> None:
        """Send requests as a Poisson process, whether or not earlier ones have ended."""
        end = time.monotonic() + seconds
        due = time.monotonic()
        async with self._client() as client, asyncio.TaskGroup() as group:
            while due < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._send(client))
                due += self.rng.expovariate(rate)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        return httpx.AsyncClient(base_url=self.url, timeout=120.0, trust_env=False, limits=limits)

    async def _send(self, shared: httpx.AsyncClient) -> None:
        draw = self.rng.random
        if draw() < FRESH_CONNECTION:
            async with self._client() as own:
                return await self._send_over(own)
        return await self._send_over(shared)

    async def _send_over(self, client: httpx.AsyncClient) -> None:
        kind = self.rng.random()
        try:
            if kind < INVALID:
                outcome = await self._invalid(client)
            elif kind < INVALID + CHATS:
                outcome = await self._chat(client)
            else:
                outcome = await self._completion(client)
        except (ErrorAnswer, httpx.HTTPError, AssertionError) as exc:
            outcome = "failed"
            self.failures.append(f"{type(exc).__name__}: {exc}")
        self.outcomes[outcome] += 1

    async def _completion(self, client: httpx.AsyncClient) -> str:
        body = new_body(self.rng, max_prompt=600, max_tokens=120)
        disconnect_after = self.rng.randint(1, 20) if self.rng.random() < DISCONNECT_SHARE else float("inf")
        answer = await send_completion(client, body, disconnect_after)
        self.tokens += answer.num_tokens
        return "left" if answer.num_tokens >= disconnect_after else "completion"

    async def _chat(self, client: httpx.AsyncClient) -> str:
        words = " ".join(self.rng.choices(("sun", "moon", "Grüße", "naïve", "数", "{}", "\n"), k=40))
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "system", "content": "You are kind."}, {"role": "user", "content": words}],
            "max_tokens": self.rng.randint(10, 100),
            "stream": self.rng.random() < 0.7,
        }
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            text = (await response.aread()).decode()
        if response.status_code != 200 or (body["stream"] and not text.endswith("data: [DONE]\n\n")):
            raise ErrorAnswer(f"{response.status_code}: {text[-200:]}")
        return "chat"

    async def _invalid(self, client: httpx.AsyncClient) -> str:
        wrong = self.rng.choice(({"max_tokens": 10**9}, {"prompt": [10**9]}, {"model": "none"}, {"n": -1}))
        response = await client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "a", **wrong})
        if response.status_code not in (400, 404):
            raise ErrorAnswer(f"{response.status_code} for {wrong}")
        return "refused"


def processes_of(fleet: Fleet) -> dict[str, psutil.Process]:
    assert fleet.router
    processes = {"router": psutil.Process(fleet.router.pid)}
    for role, (node,) in {"prefill": fleet.prefill, "decode": fleet.decode}.items():
        processes |= {f"{role} {part}": node.processes(part)[0] for part in ("frontend", "engine")}
    return processes


def samples_of(processes: Mapping[str, psutil.Process], at: float) -> Iterator[Sample]:
    for name, process in processes.items():
        memory = process.memory_full_info().uss / MEBIBYTE
        yield Sample(at, name, memory, process.num_fds(), process.num_threads())


async def soak(processes: Mapping[str, psutil.Process], traffic: Traffic, args: argparse.Namespace) -> list[Sample]:
    samples: list[Sample] = []
    start = time.monotonic()

    async def watch() -> None:
        while True:
            samples.extend(samples_of(processes, time.monotonic() - start))
            await asyncio.sleep(SAMPLED_EVERY)

    await traffic.closed(args.burst, args.seconds / 30)
    capacity = await traffic.closed(args.clients, args.seconds / 30)
    rate = args.load * capacity
    print(f"{args.clients} closed-loop clients: {capacity:.1f} requests/s; sending {rate:.1f}/s", flush=True)
    traffic.outcomes.clear()
    traffic.tokens = 0
    start = time.monotonic()
    watching = asyncio.create_task(watch())
    try:
        await traffic.open(rate, args.seconds)
    finally:
        watching.cancel()
    return samples


def window(samples: Sequence[Sample], process: str, index: int, seconds: float) -> list[Sample]:
    first = index * seconds / WINDOWS
    last = (index + 1) * seconds / WINDOWS
    return [sample for sample in samples if sample.process == process and first <= sample.at < last]


def report(samples: Sequence[Sample], processes: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Print a table and return the processes whose memory has grown too much."""
    grown = []
    print("| process | memory, MiB: second sixth | last | growth | handles | threads |\n|---|---|---|---|---|---|")
    for process in processes:
        early, late = (window(samples, process, index, args.seconds) for index in (1, WINDOWS - 1))
        before, after = (statistics.median(s.memory for s in part) for part in (early, late))
        kinds = ("handles", "threads")
        counts = [[statistics.median(getattr(s, kind) for s in part) for part in (early, late)] for kind in kinds]
        cells = " | ".join(f"{first:.0f} → {last:.0f}" for first, last in counts)
        print(f"| {process} | {before:.1f} | {after:.1f} | {(after / before - 1):+.2%} | {cells} |")
        if after > before * (1 + args.growth):
            grown.append(f"{process}: memory grew from {before:.1f} to {after:.1f} MiB")
    return grown


def write(samples: Sequence[Sample], path: Path) -> None:
    with path.open("w") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Sample)])
        table.writeheader()
        table.writerows(map(asdict, samples))


def plot(samples: Sequence[Sample], processes: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(9, 9), layout="constrained", sharex=True)
    for process in processes:
        mine = [sample for sample in samples if sample.process == process]
        for axis, kind in zip(axes, ("memory", "handles", "threads"), strict=True):
            axis.plot([s.at / 60 for s in mine], [getattr(s, kind) for s in mine], label=process, linewidth=1)
            axis.set(ylabel={"memory": "memory, MiB"}.get(kind, kind))
            axis.grid(alpha=0.3)
    for axis in axes:
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    axes[-1].set(xlabel="minutes")
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity (default %(default)s)")
    parser.add_argument(
        "--clients", type=int, default=16, help="clients that measure the capacity (default %(default)s)"
    )
    parser.add_argument("--burst", type=int, default=150, help="clients of the first peak (default %(default)s)")
    parser.add_argument("--growth", type=float, default=0.02, help="tolerated growth of memory (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    with start_fleet(EMBEDDED_MODEL, prefill_flags=FLAGS, decode_flags=FLAGS) as fleet:
        return run(fleet, args)


def run(fleet: Fleet, args: argparse.Namespace) -> int:
    processes = processes_of(fleet)
    traffic = Traffic(fleet.url, random.Random(args.seed))
    samples = asyncio.run(soak(processes, traffic, args))
    for node in (*fleet.prefill, *fleet.decode):
        node.wait_idle(QUIET_SECONDS)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in traffic.outcomes.most_common())
    print(f"{args.seconds:.0f} s: {counts}; {traffic.tokens} tokens of completions; all blocks are free")
    grown = report(samples, list(processes), args)
    if args.csv:
        write(samples, args.csv)
    if args.plot:
        plot(samples, list(processes), args.plot)
    print("\n".join([*grown, *traffic.failures[:10]]))
    return 1 if grown or traffic.failures else 0


if __name__ == "__main__":
    sys.exit(main())
