"""What faults cost: how soon they are noticed, how long blocks stay lost, and what they hold up meanwhile.

    python bench/faults.py [--repeat 3] [--peer-timeout 4]        some four minutes
    UCX_TLS=tcp python bench/faults.py                            as between machines without RDMA

One prefill and one decode node, real processes on this machine, a small model with a large KV cache: 32 KiB a token.
Needs what the tests need (pip install -e '.[dev]'). Times are in ms, the worst of the repetitions.

The first table: in the middle of the handoff of 2,000 tokens (64 MiB) one node is killed, or it is stopped, all of it
or its front or its engine alone. *noticed*: by the other node (a decode node's end: by its client). *blocks back*:
until the handoff has left nothing on the other node. On the prefill node every block is free then; on the decode node
none is reserved or quarantined for it, and it computes the prompt itself. *connected*: from when the node is ready
again until it is connected again. *gap*: the longest time in which, on the node that lives, the step loop (outside of
the model), another thread of the engine, or the event loop could not run, from its start to the end of the row.

The second: a request is held at each stage of its handoff (tests/stages.py) and cancelled. Times until each node has
all of its blocks free again; a stage that is held by stopping an engine counts from when the engine goes on.
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
FAULTS = ("killed", "node", "front", "engine")  # the last three are what is stopped
GAPS = ("step_loop", "engine_thread", "event_loop")


class Watched:
    """A node that is looked at as often as possible, over one connection."""

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
        """Nothing is left of a handoff."""
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
    """Of one fault. Seconds."""

    noticed: float
    blocks_back: float
    connected: float
    step_loop: float
    engine_thread: float
    event_loop: float


def until(condition: Callable[[], bool], start: float) -> float:
    """Seconds from ``start`` until it holds."""
    while not condition():
        if time.monotonic() > start + WAIT_SECONDS:
            raise RuntimeError(f"not within {WAIT_SECONDS:.0f} s")
        time.sleep(0.0005)
    return time.monotonic() - start


def strike(checkpoint: Path, role: str, fault: str, flags: list[str]) -> Cost:
    """Start both nodes, have one struck in the middle of a handoff, and see what becomes of the other."""
    with Fleet() as fleet:
        prefill = fleet.start_prefill(checkpoint, [*NODE, *flags, "--max-batch-tokens", "256"])
        decode = fleet.start_decode(checkpoint, [*NODE, *flags])
        fleet.wait_ready()
        victim, other = (prefill, decode) if role == "prefill" else (decode, prefill)
        watched, reader = Watched(other), Watched(decode)
        with RouterClient(decode.address) as client:
            client.generate(LONG, greedy(2), prefill.address)  # what is done for the first time takes longer
            until(lambda: watched.idle, time.monotonic())
            read = reader.bytes_read
            result = client.send(LONG, greedy(64), prefill.address, cache_salt="struck")
            until(lambda: reader.bytes_read > read, time.monotonic())
            start = time.monotonic()
            victim.kill() if fault == "killed" else victim.stop(fault)
            noticed = until(noticed_by(role, reader, client, result), start)
            blocks_back = until(lambda: watched.settled if other is decode else watched.idle, start)
        victim.restart() if fault == "killed" else victim.go_on(fault)
        back = Watched(decode)
        fleet.wait_until(lambda: victim.describe().state == "ready", WAIT_SECONDS)
        connected = until(lambda: back.num_peers == 1, time.monotonic())
        cost = Cost(noticed, blocks_back, connected, *watched.gaps)
        for each in (watched, reader, back):
            each.close()
        return cost


def noticed_by(role: str, reader: Watched, client: RouterClient, result: Generated) -> Callable[[], bool]:
    if role == "prefill":
        return lambda: reader.num_peers == 0
    return lambda: result.failure is not None or client.error is not None


def cancel(pair: Pair, stage: str) -> tuple[float, float]:
    """Seconds until D, and until P, has all blocks back."""
    nodes = Watched(pair.decode), Watched(pair.prefill)
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
        print("| who, what | noticed | blocks back | connected | gap: step loop | engine thread | event loop |")
        print("|---|---|---|---|---|---|---|")
        for role in ("prefill", "decode"):
            for fault in FAULTS:
                costs = [strike(checkpoint, role, fault, flags) for _ in range(args.repeat)]
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
