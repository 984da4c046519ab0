"""Predictions of ``pdserve plan`` compared with measured fleets: simulated nodes with equal costs, or real CPU nodes.

    PYTHONPATH=.:tests/support python bench/plan_check.py
    PYTHONPATH=.:tests/support python bench/plan_check.py --model MODEL --costs costs.toml --workload 256-512:32:1:1:2

Each workload is PROMPT:OUTPUT:P:D:RATE, with lengths as in ``pdserve plan``; with P = 0 each D also prefills. A real
router routes the requests of an open-loop load with random arrivals; the prediction is for exactly these requests.
Simulated nodes have the costs of an 8B model on an H200, ``--slower`` times as long, so that nodes, router and clients
need few CPU cycles; printed times are divided by ``--slower``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fleet import MODEL_NAME, Fleet
from loads import make_load, open_loop
from replay import VOCABULARY, make_long_model

from cli.bench.http_load import Endpoint, Trace, complete
from cli.bench.requests import Request, completion_body, random_prompt
from cli.plan.costs import Costs, Shape, load_costs
from cli.plan.node_load import LoadLimits, NodeLoad, Slo
from cli.plan.queues import percentile
from cli.plan.workload import Workload, workload_of
from pdserve.config.simulated_costs import KV_TOKENS, SimulatedCosts, StepTokens
from pdserve.model.model_config import load_model_config

WORKLOADS = (
    "p50=1500,p99=8000:p50=150,p99=600:2:2:28",
    "p50=4000,p99=16000:p50=40,p99=200:3:1:18",
    "p50=400,p99=2000:p50=300,p99=900:1:1:36",
    "p50=1500,p99=8000:p50=150,p99=600:0:4:28",
)
SHARES = (50, 90)  # percentiles of TTFT; a few hundred requests give no reliable p99


def simulated_costs(model: Path, slower: float) -> Costs:
    """Return the costs of pdserve/config/simulated_costs.py in the format of ``pdserve plan``."""
    sim = SimulatedCosts()

    def prompt(tokens: int) -> float:
        return sim.seconds(StepTokens(prompt_tokens=tokens, prompt_context=tokens * tokens / 2))

    def ms(seconds: float) -> float:
        return 1e3 * slower * seconds

    return Costs(
        model="simulated",
        gpu="none",
        hardware="none",
        commit="",
        command="",
        shape=Shape.of(load_model_config(model)),
        prefill_ms=tuple((n, ms(prompt(n))) for n in (16, 512, 2048, 8192)),
        context_ns=1e9 * slower * sim.decode_context,
        decode_ms=tuple((n, ms(sim.step + n * sim.decode)) for n in (1, 256)),
        kv_tokens=KV_TOKENS,
        first_token_ms=2.0,
        second_token_ms=tuple((n, 3.0 + ms(sim.read + n * sim.read_token)) for n in (0, 8192)),
        kv_gb_per_s=1e6,
    )


@contextmanager
def running(args: argparse.Namespace, model: Path, prefill: int, decode: int) -> Iterator[Fleet]:
    if args.model:
        flags = ["--max-num-seqs", "64"]
    else:
        token_bytes = make_long_model(model)
        flags = ["--engine", "simulated", "--sim-speed", str(1 / args.slower), "--dtype", "bfloat16"]
        flags += ["--kv-cache-memory", str(KV_TOKENS * token_bytes), "--max-batch-tokens", "8192"]
    with Fleet() as fleet:
        for start, count in ((fleet.start_prefill, prefill), (fleet.start_decode, decode)):
            for _ in range(count):
                start(model, [*flags, "--max-waiting", "4096", "--peer-timeout", "30"])
        fleet.start_router(model, ["--policy", args.policy])
        fleet.wait_ready()
        yield fleet


async def replay(url: str, workload: Workload, rate: float) -> list[Trace]:
    """Send the requests of a workload at their arrival times and return their traces."""
    endpoint = Endpoint.of(url)
    rng = random.Random(2)
    prompts = [random_prompt(rng, length, VOCABULARY) for length in workload.prompts]
    load = make_load(workload, rate, prompts)

    async def send(number: int, trace: Trace) -> None:
        request = load.requests[number]
        await complete(endpoint, completion_body(MODEL_NAME, request), request.num_tokens, trace, timeout=600)
        if trace.error:
            raise RuntimeError(trace.error)

    warmup = completion_body(MODEL_NAME, Request(0.0, random_prompt(rng, 64, VOCABULARY), 8))
    await complete(endpoint, warmup, 8, Trace(time.perf_counter()), timeout=600)  # lets nodes report their throughput
    return await open_loop(load.requests, send)


def compare(args: argparse.Namespace, model: Path, text: str) -> str:
    """Run a workload; return a table row with predicted / measured figures."""
    prompts, outputs, prefill, decode, rate_text = text.split(":")
    workload = workload_of(prompts, outputs, 0.0, args.requests)
    slower = 1.0 if args.model else args.slower
    rate = float(rate_text) / slower
    with running(args, model, int(prefill), int(decode)) as fleet:
        traces = asyncio.run(replay(fleet.url, workload, rate))
        local = sum(node.counter("local_prefills") for node in fleet.decode) / len(traces)
    costs = load_costs(args.costs) if args.costs else simulated_costs(model, slower)
    load = NodeLoad(costs, workload, Slo(dict.fromkeys(SHARES, 1e9)), LoadLimits(headroom=0.0))
    if int(prefill):
        first = load.on_prefill(rate, int(prefill))
        later = load.on_decode(rate, int(decode))
    else:
        first = later = load.aggregated(rate, int(decode))
    gaps = [gap for trace in traces for gap in trace.gaps]
    pairs = [(first.ttft[share], percentile([trace.ttft for trace in traces], share)) for share in SHARES]
    pairs += [(later.itl[share], percentile(gaps, share)) for share in (50, 99)]
    cells = [f"{1e3 * want / slower:.3g} / {1e3 * got / slower:.3g} ({want / got - 1:+.0%})" for want, got in pairs]
    busy = f"{first.utilisation:.0%}, {later.utilisation:.0%}"
    return f"| {prompts} | {outputs} | {prefill}:{decode} | {rate_text} | {busy} | {' | '.join(cells)} | {local:.0%} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=WORKLOADS, help="PROMPT:OUTPUT:P:D:RATE")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--slower", type=float, default=6.0, help="factor on simulated costs, divisor of rates")
    parser.add_argument("--policy", default="prefix-aware")
    parser.add_argument("--model", type=Path, help="use real nodes with this checkpoint and one thread each")
    parser.add_argument("--costs", help="costs of the real nodes, written by bench/engine_steps.py --costs-out")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.costs):
        parser.error("--model and --costs go together")
    print("| prompts | outputs | P:D | requests/s | busy, P and D | TTFT p50 | p90 | ITL p50 | p99 | prefilled on D |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for text in args.workload:
        with tempfile.TemporaryDirectory() as directory:
            print(compare(args, args.model or Path(directory), text), flush=True)


if __name__ == "__main__":
    main()
