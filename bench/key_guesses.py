"""Does the time of a refusal tell how much of an API key is right? Refuses random, half-right and all-but-one keys.

    python bench/key_guesses.py --tries 5000

Each try is one request on an open connection to a real router, in random order, from many loopback addresses,
because each may present only 60 unknown keys per minute. The intervals are 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pdserve.api_keys import key_entry, new_key
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.gate.refused_keys import PER_MINUTE

KEY = new_key()
RESAMPLES = 1000


def guesses() -> dict[str, str]:
    """One wrong key per kind, as long as the right one."""
    random_key, last = new_key(), "A" if KEY[-1] != "A" else "B"
    half = len(KEY) // 2
    return {"random": random_key, "half right": KEY[:half] + random_key[half:], "all but one": KEY[:-1] + last}


def refusal_seconds(sock: socket.socket, key: str) -> float:
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    started = time.perf_counter()
    sock.sendall(request)
    response = sock.recv(4096)
    while not response.endswith(b"}}"):
        response += sock.recv(4096)
    seconds = time.perf_counter() - started
    assert b" 401 " in response, response
    return seconds


def measure(port: int, tries: int) -> dict[str, list[float]]:
    """Return the seconds of each refusal by kind."""
    times: dict[str, list[float]] = {kind: [] for kind in guesses()}
    rounds = PER_MINUTE // len(times)
    for source in range(-(-tries // rounds)):
        address = f"127.1.{source >> 8}.{source & 255}"
        with socket.create_connection(("127.0.0.1", port), source_address=(address, 0)) as sock:
            for _ in range(rounds):
                for kind, key in random.sample(list(guesses().items()), len(times)):
                    times[kind].append(refusal_seconds(sock, key))
    return times


def difference(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Difference of medians and the ends of its interval, in microseconds."""
    found = sorted(
        statistics.median(random.choices(one, k=len(one))) - statistics.median(random.choices(other, k=len(other)))
        for _ in range(RESAMPLES)
    )
    centre = statistics.median(one) - statistics.median(other)
    return centre * 1e6, found[RESAMPLES // 40] * 1e6, found[-RESAMPLES // 40] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=5000, help="requests per kind of key")
    tries = parser.parse_args().tries
    with tempfile.TemporaryDirectory() as folder:
        keys, port = Path(folder) / "keys.toml", free_port()
        keys.write_text(key_entry("alice", KEY))
        flags = ["--api-keys", str(keys), "--port", str(port), "--decode", "127.0.0.1:1"]
        router = subprocess.Popen(
            [sys.executable, "-m", "router", str(EMBEDDED_MODEL), *flags], stderr=subprocess.DEVNULL
        )
        try:
            wait_open(port)
            times = measure(port, tries)
        finally:
            router.terminate()
            router.wait()
    for kind, seconds in times.items():
        print(f"{kind:12} {len(seconds)} tries, median {statistics.median(seconds) * 1e6:.1f} µs")
    for kind in list(times)[1:]:
        centre, low, high = difference(times[kind], times["random"])
        print(f"{kind:12} minus random: {centre:+.2f} µs, 95 % interval {low:+.2f} … {high:+.2f} µs")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_open(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise SystemExit("the router does not listen")


if __name__ == "__main__":
    main()
