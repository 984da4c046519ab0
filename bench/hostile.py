"""Hostile requests: how long each of them delays an honest client, and what it costs the router.

    PYTHONPATH=.:tests python bench/hostile.py [--only WORDS …] [--seconds 60] [--clients 1]

A prefill node, a decode node (simulated, without delays) and a router, each a process. Another process asks for
/health every 5 ms over one connection; its longest wait while a row runs is the stall. Columns:

    status    of the response; "-": none within --seconds; "no end": no end within --seconds; "cut": the router closed
    sent, answer   MB of the request's and of the response's body
    seconds   from the first byte sent to the last one read
    stall     ms, the longest wait of the honest client beyond its usual one
    lag       ms, the bucket of the largest value of pdserve_router_loop_lag_seconds
    before, peak, after   MiB of the router's resident memory

Add a row to ROWS, or to BODIES: a name, a path, and a function that returns the body, as JSON fields or bytes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from fleet import Fleet, start_fleet
from hostile_bodies import BODIES, UPLOADS_NAME, hold_uploads
from prometheus_client.parser import text_string_to_metric_families

from pdserve.checkpoint.hub import EMBEDDED_MODEL

INTERVAL = 0.005  # seconds between two questions of the honest client
SETTLE = 0.5  # seconds before and after a row
LAG = "pdserve_router_loop_lag_seconds"
NODE = ("--engine", "simulated", "--sim-speed", "inf")
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

Fields = dict[str, Any]


class Row(NamedTuple):
    name: str
    path: str
    body: Callable[[], Fields | bytes]


def many(**fields: Any) -> Fields:
    """A request with 128 choices of 500 tokens, at the length of the model's outputs."""
    return {"max_tokens": 500, "n": 128, "ignore_eos": True, **fields}


def prompts(**fields: Any) -> Fields:
    """A request with 40 prompts of 2,000 tokens."""
    return {"prompt": [[300 + i] * 2000 for i in range(40)], "max_tokens": 1, "ignore_eos": True, **fields}


def chat(**fields: Any) -> Fields:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def stops(**fields: Any) -> Fields:
    """The output, a's only, continues one stop string; the others differ in their first letter alone."""
    found = ["b" + "a" * 4000 + chr(0x4E00 + i) * 90 for i in range(15)]
    found.append("a" * 4000 + "b")
    return {"prompt": "a", "n": 128, "max_tokens": 2000, "stop": found, "guided_regex": "a*", **fields}


def structural_tags() -> Fields:
    tags = [{"begin": f"<{i}>", "schema": {"type": "object"}, "end": f"</{i}>"} for i in range(4000)]
    return chat(response_format={"type": "structural_tag", "structures": tags, "triggers": ["<"]})


ROWS = (
    # long answers
    Row("prompt_logprobs=20, 40 x 2,000 tokens", COMPLETIONS, lambda: prompts(prompt_logprobs=20)),
    Row("echo with logprobs=20, 40 x 2,000", COMPLETIONS, lambda: prompts(echo=True, logprobs=20)),
    Row("echo with logprobs=20, streamed", COMPLETIONS, lambda: prompts(echo=True, logprobs=20, stream=True)),
    Row("echo of texts, 40 x 8,000 characters", COMPLETIONS, lambda: prompts(prompt=["word " * 1600] * 40, echo=True)),
    Row("return_token_ids, 40 x 2,000", COMPLETIONS, lambda: prompts(return_token_ids=True)),
    Row("n=128 x 500 tokens", COMPLETIONS, lambda: many(prompt="hi")),
    Row("n=128 x 500 tokens, logprobs=20", COMPLETIONS, lambda: many(prompt="hi", logprobs=20)),
    Row("the same, streamed", COMPLETIONS, lambda: many(prompt="hi", logprobs=20, stream=True)),
    Row("n=128 x 500, chat, top_logprobs=20", CHAT, lambda: chat(**many(logprobs=True, top_logprobs=20))),
    Row(
        "the same, streamed, with usage",
        CHAT,
        lambda: chat(
            **many(
                logprobs=True,
                top_logprobs=20,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
        ),
    ),
    Row(
        "responses, 8,000 tokens, top_logprobs=20",
        RESPONSES,
        lambda: {
            "input": "hi",
            "max_output_tokens": 8000,
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
        },
    ),
    Row("16 stop strings of 4 KB, n=128", COMPLETIONS, stops),
    Row("the same, streamed", COMPLETIONS, lambda: stops(stream=True)),
    Row("1,024 prompts", COMPLETIONS, lambda: prompts(prompt=[[300 + i] for i in range(1024)])),
    Row("1,024 prompts, streamed", COMPLETIONS, lambda: prompts(prompt=[[300 + i] for i in range(1024)], stream=True)),
    # small endpoints
    Row("detokenize 4 M ids", "/detokenize", lambda: {"tokens": [300] * 4_000_000}),
    Row("detokenize 1 M ids", "/detokenize", lambda: {"tokens": [300] * 1_000_000}),
    Row("tokenize 7 MB with strings", "/tokenize", lambda: {"prompt": "word " * 1_400_000, "return_token_strs": True}),
    Row("tokenize 1 MB with strings", "/tokenize", lambda: {"prompt": "word " * 200_000, "return_token_strs": True}),
    # errors
    Row("8 MB of an unknown name", CHAT, lambda: chat(**{"x" * 8_000_000: 1})),
    Row("8 MB of a model's name", CHAT, lambda: chat(model="x" * 8_000_000)),
    Row("8 MB of a wrong token id", COMPLETIONS, lambda: b'{"prompt":[%b]}' % (b"9" * 8_000_000)),
    Row("40 KB name in structured_outputs", CHAT, lambda: chat(structured_outputs={"x" * 40_000: 1})),
    Row("40 KB reasoning_effort", CHAT, lambda: chat(reasoning_effort="x" * 40_000)),
    # long requests
    Row("structural tags of 0.2 MB", CHAT, structural_tags),
    Row("12 MB of empty lists as prompt", COMPLETIONS, lambda: b'{"prompt":[%b[]]}' % (b"[]," * 4_000_000)),
    Row("16 MB of token ids", COMPLETIONS, lambda: b'{"prompt":[%b1]}' % (b"1," * 8_000_000)),
    Row("30 MB of a text", COMPLETIONS, lambda: {"prompt": "x" * 30_000_000}),
    Row("30 MB of a message", CHAT, lambda: chat(messages=[{"role": "user", "content": "x" * 30_000_000}])),
)
UNFINISHED = Row(UPLOADS_NAME, COMPLETIONS, dict)
ALL_ROWS = (*ROWS, *(Row(*each) for each in BODIES), UNFINISHED)


class Result(NamedTuple):
    """The answer to a row, as its client received it."""

    status: str
    num_sent: int  # bytes, as are num_received
    num_received: int
    seconds: float


def send(address: str, row: Row, limit: float) -> Result:
    if row is UNFINISHED:
        started = time.monotonic()
        return Result(*hold_uploads(address), time.monotonic() - started)
    fields = row.body()
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    size, status, started = 0, "-", time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=limit)
    try:
        connection.request("POST", row.path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        status = str(response.status)
        while data := response.read1(1 << 20):
            size += len(data)
            if time.monotonic() > started + limit:
                raise TimeoutError
    except TimeoutError:
        status += "" if status == "-" else ", no end"
    except (OSError, http.client.HTTPException):
        status = "cut" if status == "-" else status + ", cut"
    finally:
        connection.close()
    return Result(status, len(body), size, time.monotonic() - started)


def ask_health(address: str, pipe: Connection) -> None:
    """Ask for /health over one connection; answer each message of ``pipe`` with the longest wait since the last one."""
    connection = http.client.HTTPConnection(address)
    longest = 0.0
    while True:
        asked = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        longest = max(longest, time.monotonic() - asked)
        if pipe.poll(INTERVAL):
            pipe.recv()
            pipe.send(longest)
            longest = 0.0


def lag_buckets(address: str) -> dict[float, float]:
    """Return the cumulated counts of the loop's lag by upper bound."""
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [each for family in families if family.name == LAG for each in family.samples]
    return {float(each.labels["le"]): each.value for each in samples if each.name.endswith("_bucket")}


def largest_lag(before: dict[float, float], after: dict[float, float]) -> float:
    """Return the upper bound of the highest bucket with a new observation."""
    new = {bound: after[bound] - before[bound] for bound in after}
    return next(bound for bound, count in new.items() if count == new[float("inf")])


class Memory:
    """The resident memory of a process in MiB."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = Path(f"/proc/{pid}/clear_refs")

    @property
    def now(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    def reset_peak(self) -> None:
        self._peak.write_text("5")

    @property
    def peak(self) -> float:
        lines = self._peak.with_name("status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def send_all(address: str, row: Row, limit: float, num_clients: int) -> Result:
    """Send a row from several clients at once and return all statuses, the bytes, and the longest time."""
    with ThreadPoolExecutor(num_clients) as threads:
        results = list(threads.map(lambda _: send(address, row, limit), range(num_clients)))
    statuses, sent, received, seconds = zip(*results, strict=True)
    return Result(" or ".join(sorted(set(statuses))), sum(sent), sum(received), max(seconds))


def measure(fleet: Fleet, row: Row, limit: float, num_clients: int) -> str:
    """Send the body of a row and return the line of the table."""
    assert fleet.router is not None
    address = fleet.router.address
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(target=ask_health, args=(address, theirs), daemon=True)
    client.start()
    memory = Memory(fleet.router.pid)
    try:
        _longest_wait(ours)  # with the start
        time.sleep(SETTLE)
        usual, lag, before = _longest_wait(ours), lag_buckets(address), memory.now
        memory.reset_peak()
        result = send_all(address, row, limit, num_clients)
        peak = memory.peak
        stall = max(0.0, _longest_wait(ours) - usual)
        lagged = largest_lag(lag, lag_buckets(address))
        time.sleep(SETTLE)
    finally:
        client.kill()
        client.join()
    return (
        f"| {row.name} | {result.status} | {result.num_sent / 1e6:.1f} | {result.num_received / 1e6:.1f} "
        f"| {result.seconds:.1f} | {1000 * stall:.0f} | ≤ {1000 * lagged:.0f} "
        f"| {before:.0f} | {peak:.0f} | {memory.now:.0f} |"
    )


def _longest_wait(pipe: Connection) -> float:
    pipe.send(None)
    return float(pipe.recv())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="rows whose names contain one of these"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time of a row")
    parser.add_argument("--clients", type=int, default=1, help="that send each row at once")
    args = parser.parse_args()
    print("| body | status | sent MB | answer MB | seconds | stall ms | lag ms | before MiB | peak | after |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in ALL_ROWS:
        if any(words in row.name for words in args.only):
            with start_fleet(EMBEDDED_MODEL, prefill_flags=NODE, decode_flags=NODE) as fleet:
                fleet.wait_until(fleet.serves, 10.0)
                print(measure(fleet, row, args.seconds, args.clients), flush=True)


if __name__ == "__main__":
    main()
