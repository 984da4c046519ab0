"""Cost of faults: detection time, time until blocks are free, time until reconnected, and longest loop gaps.

    python bench/faults.py [--repeat 3] [--peer-timeout 4]        about four minutes
    UCX_TLS=tcp python bench/faults.py                            as between machines without RDMA

One prefill and one decode node, real processes on this machine, with a small model and a large KV cache: 32 KiB per
token. Needs the test dependencies (pip install -e '.[dev]'). Times are in ms, the worst of the repetitions.

First table: during the handoff of 2,000 tokens (64 MiB), one node is killed; or the node, its frontend or its engine is
stopped. Columns:

    noticed      until the other node detects the fault; for a decode node, until its client does
    blocks back  until the handoff holds nothing on the other node: on P all blocks are free; on D no block is reserved
                 or quarantined for it, and D computes the prompt itself
    connected    from the node's recovery until it is connected again
    gap          longest time that a loop of the other node could not run, from its start to the end of the row: the
                 step loop (without the model), another thread of the engine, and the event loop

Second table: a request is held at each stage of its handoff (tests/stages.py) and cancelled. The time ends when each
node has all blocks free; if the stage stops an engine, the time begins when the engine resumes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from checkpoints import make_checkpoint
from fleet import Fleet, NodeProcess
from node_client import Generated, RouterClient, greedy
from stages import STAGES, Pair, held_at, start_pair

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

WAIT_SECONDS = 60.0
LARGE_KV: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 256}
LONG = random.Random(0).choices(range(3, 128), k=2000)
NODE = ("--kv-cache-memory", "256MiB", "--max-model-len", "4096")
FAULTS = ("killed", "node", "frontend", "engine")  # killed, or this part stopped
GAPS = ("step_loop", "engine_thread", "event_loop")


class NodePoller:
    """Polls a node's status as often as possible over one connection."""

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        self._channel = grpc.insecure_channel(node.address)
        self._stub = pb_grpc.NodeStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def status(self) -> pb.NodeStatus:
        return self._stub.Status(pb.StatusRequest(), timeout=5.0)

    @property
    def idle(self) -> bool:
        status = self.status()
        return status.free_blocks == status.total_blocks

    @property
    def settled(self) -> bool:
        """Whether no block is being read, quarantined or leased."""
        status = self.status()
        return not (status.reading or status.quarantined_blocks or status.leased_blocks)

    @property
    def bytes_read(self) -> float:
        return self.node.counter("kv_read_bytes")

    @property
    def num_peers(self) -> int:
        return len(self._stub.Describe(pb.DescribeRequest(), timeout=5.0).connected_peers)

    @property
    def gaps(self) -> list[float]:
        counters = self.status().counters
        return [counters[f"pdserve_{name}_gap_max_seconds"] for name in GAPS]


class Cost(NamedTuple):
    """Cost of one fault, in seconds."""

    noticed: float
    blocks_back: float
    connected: float
    step_loop: float
    engine_thread: float
    event_loop: float


def until(condition: Callable[[], bool], start: float) -> float:
    """Wait until a condition holds; return the seconds since ``start``."""
    while not condition():
        if time.monotonic() > start + WAIT_SECONDS:
            raise RuntimeError(f"not within {WAIT_SECONDS:.0f} s")
        time.sleep(0.0005)
    return time.monotonic() - start


def measure_fault(checkpoint: Path, role: str, fault: str, flags: list[str]) -> Cost:
    """Start both nodes, inject a fault into one of them during a handoff, and measure its effect on the other."""
    with Fleet() as fleet:
        prefill = fleet.start_prefill(checkpoint, [*NODE, *flags, "--max-batch-tokens", "256"])
        decode = fleet.start_decode(checkpoint, [*NODE, *flags])
        fleet.wait_ready()
        victim, other = (prefill, decode) if role == "prefill" else (decode, prefill)
        survivor, reader = NodePoller(other), NodePoller(decode)
        with RouterClient(decode.address) as client:
            client.generate(LONG, greedy(2), prefill.address)  # warm-up
            until(lambda: survivor.idle, time.monotonic())
            read = reader.bytes_read
            result = client.send(LONG, greedy(64), prefill.address, cache_salt="fault")
            until(lambda: reader.bytes_read > read, time.monotonic())
            start = time.monotonic()
            victim.kill() if fault == "killed" else victim.stop(fault)
            noticed = until(noticed_by(role, reader, client, result), start)
            blocks_back = until(lambda: survivor.settled if other is decode else survivor.idle, start)
        victim.restart() if fault == "killed" else victim.resume(fault)
        reconnected = NodePoller(decode)
        fleet.wait_until(lambda: victim.describe().state == "ready", WAIT_SECONDS)
        connected = until(lambda: reconnected.num_peers == 1, time.monotonic())
        cost = Cost(noticed, blocks_back, connected, *survivor.gaps)
        for each in (survivor, reader, reconnected):
            each.close()
        return cost


def noticed_by(role: str, reader: NodePoller, client: RouterClient, result: Generated) -> Callable[[], bool]:
    if role == "prefill":
        return lambda: reader.num_peers == 0
    return lambda: result.failure is not None or client.error is not None


def cancel(pair: Pair, stage: str) -> tuple[float, float]:
    """Cancel a request at a stage; return the seconds until D and until P has all blocks free."""
    nodes = NodePoller(pair.decode), NodePoller(pair.prefill)
    with held_at(stage, pair) as held:
        held.client.cancel(held.result)
        held.release()
        start = time.monotonic()
        taken = [0.0, 0.0]
        while not all(taken):
            for index, node in enumerate(nodes):
                if not taken[index] and node.idle:
                    taken[index] = time.monotonic() - start
    for node in nodes:
        node.close()
    return taken[0], taken[1]


def worst(costs: list[tuple[float, ...]]) -> list[str]:
    return [f"{max(column) * 1000:.0f}" for column in zip(*costs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-timeout", type=float, default=4.0, metavar="S")
    args = parser.parse_args()
    flags = ["--peer-timeout", str(args.peer_timeout)]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory) / "model", "qwen3", **LARGE_KV)
        print("| role, fault | noticed | blocks back | connected | gap: step loop | engine thread | event loop |")
        print("|---|---|---|---|---|---|---|")
        for role in ("prefill", "decode"):
            for fault in FAULTS:
                costs = [measure_fault(checkpoint, role, fault, flags) for _ in range(args.repeat)]
                what = fault if fault == "killed" else f"{fault} stopped"
                print(f"| {role}, {what} | {' | '.join(worst([*costs]))} |", flush=True)
        print("\n| cancelled | blocks back on decode | on prefill |\n|---|---|---|")
        with start_pair(checkpoint, NODE) as pair:
            for stage in STAGES:
                taken = [cancel(pair, stage) for _ in range(args.repeat)]
                print(f"| {stage} | {' | '.join(worst([*taken]))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
