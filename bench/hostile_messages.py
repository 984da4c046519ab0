"""Hostile gRPC messages to nodes: how long they delay the health calls of others.

    PYTHONPATH=.:tests python bench/hostile_messages.py [--mb 60]

Another process sends each kind of message to a prefill and a decode node (simulated), while health calls are made every
5 ms over one connection. Columns: messages sent, their size in MB, status of the attacker's calls, the longest health
call in ms, and the node's resident memory afterwards in MiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
from fleet import NodeProcess, start_fleet
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.checkpoint.hub import EMBEDDED_MODEL

INTERVAL = 0.005  # seconds between two health calls
SERVE = {"decode": "/pdserve.v1.DecodeNode/Serve", "prefill": "/pdserve.v1.PrefillNode/Serve"}
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


def field(number: int, data: bytes) -> bytes:
    return bytes(_VarintBytes(number << 3 | 2) + _VarintBytes(len(data)) + data)


def messages(role: str, size: int) -> dict[str, tuple[int, bytes]]:
    """Return counts and messages by description; a large one is sent on ten connections, small ones on one stream."""
    tokens = 3 if role == "decode" else 4
    return {
        "token ids": (10, field(1, field(tokens, bytes(size)))),
        "stop ids": (10, field(1, field(tokens, b"\1\0\0\0") + field(tokens + 1, field(13, bytes(size))))),
        "empty submessages": (10, field(1, b"\x4a\x00" * (size // 2))),
        "small, refused": (20_000, field(1, b"\x08\x01")),
    }


def attack(address: str, path: str, count: int, message: bytes, outcomes: Any) -> None:
    """Send the message ``count`` times; put the number of calls by status."""
    per_call = 1 if count == 10 else count

    def call(_: int) -> str:
        channel: Any
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            try:
                list(channel.stream_stream(path)(iter([message] * per_call), timeout=60.0))
            except grpc.RpcError as exc:
                return str(exc.code().name)
        return "OK"

    with ThreadPoolExecutor(10) as pool:
        outcomes.put(Counter(pool.map(call, range(count // per_call))))


def measure(node: NodeProcess, role: str, name: str, count: int, message: bytes) -> str:
    context = multiprocessing.get_context("spawn")
    outcomes: Any = context.Queue()
    attacker = context.Process(target=attack, args=(node.address, SERVE[role], count, message, outcomes))
    longest = 0.0
    with grpc.insecure_channel(node.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        attacker.start()
        while attacker.is_alive():
            asked = time.monotonic()
            health.Check(health_pb2.HealthCheckRequest(), timeout=120.0)
            longest = max(longest, time.monotonic() - asked)
            time.sleep(INTERVAL)
    attacker.join()
    status = ", ".join(f"{number} {code}" for code, number in outcomes.get().items())
    memory = psutil.Process(node.pid).memory_info().rss >> 20
    return f"| {role} | {name} | {count} | {len(message) / 1e6:.3g} | {status} | {1000 * longest:.0f} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=60, help="size of the large messages")
    size = parser.parse_args().mb * 1_000_000
    print("| node | message | count | MB | status | health ms | MiB |\n|---|---|---|---|---|---|---|")
    for role in SERVE:
        for name, (count, message) in messages(role, size).items():
            flags = ("--engine", "simulated")
            with start_fleet(EMBEDDED_MODEL, router=False, prefill_flags=flags, decode_flags=flags) as fleet:
                node = (fleet.decode if role == "decode" else fleet.prefill)[0]
                print(measure(node, role, name, count, message), flush=True)


if __name__ == "__main__":
    main()
