"""Comparison of router policies and KV tiers: the same trace is replayed to a fleet of simulated nodes with each.

    PYTHONPATH=.:tests/support python bench/replay.py --prefill 4 --decode 4 --requests 400
    PYTHONPATH=.:tests/support python bench/replay.py --prefill 2 --decode 2 --shape coding --requests 400 --rate 0.5 \\
        --policies round-robin prefix-aware --host-tokens 0 2000000

``--trace`` replays a file in Mooncake's format (cli/plan/workload.py). Without it, a trace is generated. ``chat``:
sessions of several messages, whose prompts repeat the whole conversation after one of 20 system prompts with a Zipf
distribution. ``coding``: sessions of 33 turns with tool results, whose context grows to 80,000 tokens, with 131 prompt
tokens per output token, after one of 4 system prompts with tools.

``--shrink`` divides lengths and sizes of memory and multiplies the costs per token by the same factor, so that a fleet
needs less CPU for the same times. Each row of the table has a fleet of its own with empty caches. Of all prompt tokens,
``cached`` are those that no node computed, and the next columns those whose KV came back from host memory or from the
cache of a peer (``--pulls``); ``saved`` and ``lost`` are the seconds of both, by the nodes' metrics. Answers
in the history of a prompt are not those that the nodes gave, so no cache has them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fleet import MODEL_NAME, Fleet
from loads import open_loop, trace_prompt

from cli.bench.http_load import Endpoint, Trace, complete
from cli.bench.requests import Request, completion_body
from cli.plan.workload import BLOCK, TraceRequest, read_trace
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.simulated_costs import KV_TOKENS, SimulatedCosts
from pdserve.flags.value_types import positive_int
from router.fleet.policy import POLICIES

VOCABULARY = 4000


@dataclass
class Results:
    """Results of one policy: seconds to the first tokens, and cached prompt tokens."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    local: float = 0.0  # prompts that decode nodes prefilled by choice
    loaded: float = 0.0  # tokens, from host memory
    pulled: float = 0.0  # tokens, from the prefix cache of a peer
    saved: float = 0.0  # seconds, by loads and pulls
    lost: float = 0.0  # seconds, by loads and pulls
    seconds: float = 0.0

    def row(self, name: str) -> str:
        cuts = statistics.quantiles(self.ttft, n=100)
        times = " | ".join(f"{1000 * seconds:.0f}" for seconds in (cuts[49], cuts[89], cuts[98]))
        shares = [tokens / self.prompt_tokens for tokens in (self.cached_tokens, self.loaded, self.pulled)]
        shares.append(self.local / len(self.ttft))
        seconds = " | ".join(f"{seconds:.0f}" for seconds in (self.saved, self.lost, self.seconds))
        return f"| {name} | {times} | {' | '.join(f'{share:.0%}' for share in shares)} | {seconds} |"


def coding_trace(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Generate sessions that start as a Poisson process; ``rate`` is the mean of requests/s.

    All sessions have run for some turns when the trace begins, so that it has turns of all lengths.
    """
    rng = random.Random(seed)
    ids = iter(range(1 << 40))
    systems = [[next(ids) for _ in range(16)] for _ in range(4)]  # 8,192 tokens of instructions and tools
    turns = 33
    requests = list[TraceRequest]()
    start = -turns * 10.0
    while start * rate < num_requests:
        start += rng.expovariate(rate / turns)
        history = list(rng.choice(systems))
        at = start
        for _ in range(turns):
            history += [next(ids) for _ in range(max(1, round(rng.lognormvariate(1.1, 0.8))))]  # a tool's result
            output = max(8, min(4000, round(rng.lognormvariate(5.45, 0.9))))
            if at >= 0.0:
                length = len(history) * BLOCK - rng.randrange(BLOCK)
                requests.append(TraceRequest(1000 * at, length, output, tuple(history)))
            history[-1:] = [next(ids) for _ in range(1 + output // BLOCK)]  # the answer begins in the last block
            at += 0.02 * output + 2.0 + rng.expovariate(1 / 6.0)  # the answer, and the tool
    requests.sort(key=lambda request: request.at)
    return requests[:num_requests]


def chat_trace(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Generate sessions that start as a Poisson process; ``rate`` is the mean of requests/s."""
    rng = random.Random(seed)
    ids = iter(range(1 << 40))
    systems = [[next(ids) for _ in range(rng.randint(1, 6))] for _ in range(20)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    mean_messages = 4.0
    requests = list[TraceRequest]()
    start = 0.0
    while len(requests) < 2 * num_requests:  # twice as many, because the last sessions are cut off below
        start += rng.expovariate(rate / mean_messages)
        history = list(rng.choices(systems, weights)[0])
        at = start
        for _ in range(max(1, round(rng.expovariate(1 / mean_messages)))):
            history += [next(ids) for _ in range(max(1, round(rng.lognormvariate(1.5, 1.0))))]
            output = max(8, min(2000, round(rng.lognormvariate(5.3, 0.8))))
            requests.append(
                TraceRequest(1000 * at, len(history) * BLOCK - rng.randrange(BLOCK), output, tuple(history))
            )
            history[-1:] = [next(ids) for _ in range(1 + output // BLOCK)]  # the answer begins in the last block
            at += 5.0 + rng.expovariate(1 / 15.0)  # seconds to read the answer and write the next message
    requests.sort(key=lambda request: request.at)
    return requests[:num_requests]


def make_long_model(directory: Path) -> int:
    """Write the embedded model without weights and with a long context; return KV bytes per token in bfloat16."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory / name)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 18}))
    return 2 * 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])  # K and V


SHAPES = {"chat": chat_trace, "coding": coding_trace}


@contextmanager
def running_fleet(args: argparse.Namespace, policy: str, host_tokens: int) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        token_bytes = make_long_model(model)
        costs = SimulatedCosts()
        times = args.shrink
        sim = f"prompt-token={costs.prompt_token * times},read-token={costs.read_token * times}"
        sim += f",host-token={costs.host_token * times}"
        sim += f",prompt-context={costs.prompt_context * times**2},decode-context={costs.decode_context * times}"
        flags = ["--engine", "simulated", "--sim-costs", sim, "--block-size", "16", "--dtype", "bfloat16"]
        flags += ["--kv-cache-memory", str(args.kv_tokens // times * token_bytes)]
        if host_tokens:
            flags += ["--host-kv-memory", str(host_tokens // times * token_bytes)]
        flags += ["--max-batch-tokens", str(8192 // times), "--max-waiting", "4096", "--peer-timeout", "30"]
        listed = model / "nodes"
        listed.touch()
        if args.pulls:
            flags += ["--kv-source", f"file://{listed}"]
        with Fleet() as fleet:
            for start, count in ((fleet.start_prefill, args.prefill), (fleet.start_decode, args.decode)):
                for _ in range(count):
                    start(model, flags)
            listed.write_text("".join(f"{node.address}\n" for node in fleet.nodes))
            fleet.start_router(model, ["--policy", policy])
            fleet.wait_ready()
            yield fleet


async def replay(url: str, trace: Sequence[TraceRequest], shrink: int, speed: float) -> Results:
    endpoint = Endpoint.of(url)
    requests = [
        Request(request.at / speed, trace_prompt(request, VOCABULARY, shrink), max(1, request.output_length // shrink))
        for request in trace
    ]

    async def send(number: int, trace: Trace) -> None:
        body = completion_body(MODEL_NAME, requests[number])
        await complete(endpoint, body, requests[number].num_tokens, trace, timeout=600)

    began = time.perf_counter()
    traces = await open_loop(requests, send)
    failed = [trace.error for trace in traces if trace.error]
    assert not failed, failed[0]
    return Results(
        ttft=[trace.ttft for trace in traces],
        prompt_tokens=sum(len(request.prompt) for request in requests),
        cached_tokens=sum(trace.cached_tokens for trace in traces),
        seconds=time.perf_counter() - began,
    )


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines in Mooncake's format; default: a generated trace")
    parser.add_argument("--requests", type=int, default=400, help="first requests of the trace to replay")
    parser.add_argument("--shape", choices=[*SHAPES], default="chat", help="of a generated trace")
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s of a generated trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0, help="factor on the arrival rate")
    parser.add_argument("--shrink", type=int, default=16, help="see above; divides 512")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--kv-tokens", type=positive_int, default=KV_TOKENS, help="on the device of each node")
    parser.add_argument("--host-tokens", type=int, nargs="+", default=[0], help="in host memory of each node; 0: none")
    parser.add_argument("--pulls", action="store_true", help="all nodes may read prefixes from each other's caches")
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES])
    args = parser.parse_args(None if argv is None else list(argv))
    if args.trace is None:
        requests = SHAPES[args.shape](args.requests, args.rate, args.seed)
    else:
        requests = [request for _, request in zip(range(args.requests), read_trace(args.trace), strict=False)]
    tokens = sum(request.input_length for request in requests)
    blocks = {number for request in requests for number in request.hash_ids}
    named = sum(len(request.hash_ids) for request in requests)
    print(
        f"{len(requests)} requests in {requests[-1].at / args.speed:.0f} s, {tokens / len(requests):.0f} prompt tokens"
    )
    print(f"each; {1 - len(blocks) / named:.0%} of the blocks came before\n")
    head = "TTFT p50 (ms) | p90 | p99 | cached | from host | from peers | on D | saved (s) | lost (s) | seconds"
    print(f"| policy | host tokens | {head} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for policy, host_tokens in itertools.product(args.policies, args.host_tokens):
        with running_fleet(args, policy, host_tokens) as fleet:
            results = asyncio.run(replay(fleet.url, requests, args.shrink, args.speed))
            nodes = [*fleet.prefill, *fleet.decode]
            results.local = sum(node.counter("local_prefills") for node in fleet.decode)
            results.loaded = sum(node.counter("host_kv_hit_tokens") for node in nodes)
            results.pulled = sum(node.counter("pulled_tokens") for node in nodes)
            saved, lost = ([f"{source}_{what}_seconds" for source in ("host_kv", "pull")] for what in ("saved", "lost"))
            results.saved = sum(node.counter(name) for node in nodes for name in saved)
            results.lost = sum(node.counter(name) for node in nodes for name in lost)
        print(results.row(f"{policy} | {host_tokens}"), flush=True)


if __name__ == "__main__":
    main()
