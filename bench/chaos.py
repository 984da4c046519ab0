"""Random faults under load: nodes are killed, stopped and restarted, and every answer must stay exact.

    python bench/chaos.py --seconds 600                                     4 P + 4 D, simulated
    python bench/chaos.py --seconds 600 --real --prefill 1 --decode 2       a tiny random checkpoint, on the CPU
    python bench/chaos.py --seconds 600 --real --prefill 1 --decode 2 --prefill-pp 2 --decode-tp 2
    python bench/chaos.py --seconds 60 --real --prefill 1 --decode 2 --dtype bfloat16 --no-faults         the control
    python bench/chaos.py --seconds 600 --real --elastic 3                          nodes that prefill and decode
    python bench/chaos.py --seconds 600 --real --elastic 3 --device cuda:0 cuda:1                     on two GPUs
    python bench/chaos.py --seconds 600 --real --prefill 1 --decode 2 --device cuda                   all on one GPU

Needs the test dependencies (pip install -e '.[dev]'); all processes run on this machine. First, the undisturbed fleet
answers every request. Then clients repeat the requests for --seconds, while nodes are killed (frontend, engine or
another rank), terminated, or stopped (the whole node or one of these). A decode node gets a fault only while another
one serves. Some clients disconnect before the end, and some read slowly. Hostile streams to all nodes claim requests
and leases of other streams. The same --seed gives the same requests and the same faults.

Answers are compared with answers of another batch. In float32 they are equal; in bfloat16 sums depend on the batch, and
some answers differ without faults, too. On GPUs, float32 products are not rounded to TF32: torch's default, and the
choice of the Triton kernels, which attend here because FlashInfer has no float32. Nodes get --device round-robin, and
share a GPU with 64 MiB of KV each; a node of several ranks takes GPUs from its --device on.

Exits with status 1 if a client received an error or a different answer, a node obeyed a hostile stream, or a block is
lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from checkpoints import make_checkpoint
from client_load import VOCABULARY, Load, new_body, new_unbuffered_body
from fault_injection import FaultInjector, random_faults
from fleet import Fleet, add_tokenizer
from hostile_streams import HostileStreams

SIMULATED = ("--engine", "simulated")
HANDOFF_ALL = ("--handoff-min-tokens", "1")
METRICS = ("pdserve_migrations_total", "pdserve_replayed", "pdserve_client_pauses_total")
LINE = 4000  # characters of a failure
OVERDUE_SECONDS = 30.0  # after the last request was sent
BFLOAT16_TOLERANCE = 0.1  # largest difference of log-probabilities
RELEASE_SECONDS = 60.0  # leases of dead nodes must expire first
START_SECONDS = 300.0  # a first start on a GPU compiles kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prefill", type=int, default=4, metavar="N")
    parser.add_argument("--decode", type=int, default=4, metavar="N")
    parser.add_argument(
        "--elastic", type=int, default=0, metavar="N", help="so many nodes of both roles, and no others"
    )
    parser.add_argument("--real", action="store_true", help="nodes with a tiny model instead of simulated ones")
    parser.add_argument(
        "--device", nargs="+", default=[], metavar="DEVICE", help="of the real nodes, round-robin (default: cpu)"
    )
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}-pp", type=int, default=1, metavar="N", help="pipeline stages of each")
        parser.add_argument(f"--{role}-tp", type=int, default=1, metavar="N", help="tensor shards of each")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the tiny model")
    parser.add_argument("--no-faults", action="store_true", help="other batches only: the control for other dtypes")
    parser.add_argument("--clients", type=int, default=16, metavar="N")
    parser.add_argument("--requests", type=int, default=40, metavar="N", help="distinct requests (default %(default)s)")
    parser.add_argument("--slow", type=int, default=4, metavar="N", help="… whose clients read slowly (default 4)")
    parser.add_argument(
        "--pause", type=float, default=4.0, metavar="S", help="mean seconds between faults (default %(default)s)"
    )
    parser.add_argument("--migrations", type=int, default=50, metavar="N", help="of the router (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.real and {args.prefill_pp, args.prefill_tp, args.decode_pp, args.decode_tp} != {1}:
        parser.error("a simulated node has one rank; add --real, or leave stages and shards at 1")
    if args.device and not args.real:
        parser.error("a simulated node has no device; add --real, or leave out --device")
    counts = {"prefill": args.prefill, "decode": args.decode}
    if args.elastic:
        counts = {"both": args.elastic}
    with tempfile.TemporaryDirectory() as directory, started(args, counts, Path(directory)) as fleet:
        return run(fleet, args, counts)


@contextmanager
def started(args: argparse.Namespace, counts: dict[str, int], directory: Path) -> Iterator[Fleet]:
    """Start nodes by role and a router, and wait until all are ready."""
    checkpoint = make_checkpoint(directory / "model", "qwen3", dtype=args.dtype, vocab_size=VOCABULARY)
    model = add_tokenizer(checkpoint)
    engine = () if args.real else SIMULATED
    reads = HANDOFF_ALL if args.real or args.elastic else ()  # computing a prompt of the tiny model again is cheaper
    with Fleet(devices=args.device) as fleet:
        for _ in range(counts.get("prefill", 0)):
            ranks = ("--pp", str(args.prefill_pp), "--tp", str(args.prefill_tp))
            fleet.start_prefill(model, (*engine, *ranks))
        for _ in range(counts.get("decode", 0)):
            ranks = ("--pp", str(args.decode_pp), "--tp", str(args.decode_tp))
            fleet.start_decode(model, (*engine, *ranks, *reads))
        for _ in range(counts.get("both", 0)):
            fleet.start_both(model, directory / "nodes", (*engine, *reads))
        fleet.start_router(model, ("--migrations", str(args.migrations)))
        fleet.wait_ready(START_SECONDS)
        if fleet.both:
            fleet.wait_connected()
        yield fleet


def run(fleet: Fleet, args: argparse.Namespace, counts: dict[str, int]) -> int:
    rng = random.Random(args.seed)
    bodies = [new_body(rng, max_prompt=300, max_tokens=150) for _ in range(args.requests)]
    load = Load([*bodies, *(new_unbuffered_body(rng) for _ in range(args.slow))])
    if args.dtype == "bfloat16":
        load.tolerance = BFLOAT16_TOLERANCE
    asyncio.run(load.record_expected(fleet.url, rng))
    started = time.monotonic()
    ranks = {"prefill": args.prefill_pp * args.prefill_tp, "decode": args.decode_pp * args.decode_tp, "both": 1}
    faults = random_faults(args.seed, counts, args.pause, ranks)
    if args.no_faults:
        faults = iter(())
    overdue = threading.Timer(args.seconds + OVERDUE_SECONDS, report_overdue, (fleet, load))
    overdue.daemon = True
    overdue.start()
    with FaultInjector(fleet, faults) as injector, HostileStreams(fleet, args.seed) as hostile:
        asyncio.run(load.run(fleet.url, args.clients, args.seconds, args.seed))
    overdue.cancel()
    lasted = time.monotonic() - started
    for node in fleet.nodes:
        node.wait_idle(RELEASE_SECONDS)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in load.outcomes.most_common())
    print(
        f"seed {args.seed}, {lasted:.0f} s: {outcomes}; {load.tokens} tokens, {sum(injector.injected.values())} faults"
    )
    print(f"  slowest answer: {load.slowest:.1f} s")
    print("\n".join(f"  {what}: {count}" for what, count in sorted(injector.injected.items())))
    print("\n".join(f"  hostile streams to {what}: {count}" for what, count in sorted(hostile.ends.items())))
    print("\n".join(f"  {n.name} since its last start: {n.counter('handoffs'):.0f} handoffs" for n in fleet.decoding))
    metrics = httpx.get(f"{fleet.url}/metrics", trust_env=False).text.splitlines()
    print("\n".join(line for line in metrics if line.startswith(METRICS)))
    failures = [*load.failures, *hostile.failures]
    print("\n".join(failure[:LINE] for failure in failures[:10]))
    return 1 if failures else 0


def report_overdue(fleet: Fleet, load: Load) -> None:
    """Print what has not ended long after the last request was sent."""
    print(f"overdue: requests {sorted(load.in_flight.values())}", flush=True)
    for node in fleet.nodes:
        try:
            status = node.status()
            state = node.describe().state
            counts = f"{status.waiting} waiting, {status.reading} reading, {status.running} running"
            print(f"  {node.name} is {state}: {counts}, {status.paused} paused", flush=True)
        except grpc.RpcError as exc:
            print(f"  {node.name} does not answer: {exc}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
