"""The flags of ``pdserve plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.plan.prediction import LEAST_REQUESTS
from cli.plan.workload import SAMPLES
from pdserve.config.node_options import KV_CACHE_DTYPES, MOST_TARGET
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.flags.value_types import positive_int
from pdserve.request_cost import AUTO_ITL_STEPS, TTFT_OBJECTIVE


def make_parser() -> CommandParser:
    parser = command_parser("pdserve plan", "Compute how many prefill and decode nodes a workload needs.")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="checkpoint directory or hub id (or use --costs)")
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--gpu", metavar="KIND", help="GPU of the measured costs (default h200)")
    nodes.add_argument("--pp", type=positive_int, metavar="N", help="pipeline stages of a node (default 1)")
    nodes.add_argument("--tp", type=positive_int, metavar="N", help="tensor shards of a stage (default 1)")
    nodes.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="dtype of the nodes' KV cache, with which the costs must have been measured (default %(default)s)",
    )
    nodes.add_argument("--costs", metavar="NAME", help="measured costs: a file, or the name of a bundled one")
    seqs = "decoding sequences per node (default: as a node chooses it for the measured KV memory)"
    nodes.add_argument("--max-num-seqs", type=positive_int, metavar="N", help=seqs)
    nodes.add_argument(
        "--network", type=_positive, metavar="GB/S", help="10^9 bytes/s into or out of a node (default: as measured)"
    )
    nodes.add_argument(
        "--itl-target",
        type=_target,
        metavar="MS",
        help=f"the nodes' --itl-target (default auto: {AUTO_ITL_STEPS:g} decode steps)",
    )
    nodes.add_argument(
        "--ttft-target",
        type=_target,
        default=TTFT_OBJECTIVE,
        metavar="MS",
        help=f"the nodes' --ttft-target (default {1e3 * TTFT_OBJECTIVE:g})",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=_positive, metavar="R", help="requests per second; prints the nodes needed")
    load.add_argument("--gpus", type=positive_int, metavar="N", help="available GPUs; prints the rate they can serve")
    load.add_argument(
        "--prompt-tokens",
        metavar="LENGTH",
        help="2048, 256-1024 (uniform), or log-normal: p50=900,p99=8000, mean=1500,p99=8000 or mean=2000,sigma=0.8; "
        "default 2048",
    )
    load.add_argument("--output-tokens", metavar="LENGTH", help="the same formats (default 256)")
    load.add_argument("--cached", type=float, metavar="F", help="share of prompts in prefix caches (default 0)")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay requests and their rate from a trace in Mooncake's format"
    )
    parser.add_argument(
        "--slo", default="", metavar="SLO", help="percentiles of TTFT and ITL, e.g. ttft:p99=1s,itl:p99=30ms"
    )
    parser.add_argument(
        "--headroom",
        type=float,
        default=0.2,
        metavar="F",
        help="share of a fleet's capacity to keep free (default 0.2)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of arrivals and lengths (default 1)")
    parser.add_argument(
        "--requests",
        type=_sample,
        default=0,
        metavar="N",
        help="requests of each simulation, or first ones of a trace (default: more for more nodes, shorter outputs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _sample(text: str) -> int:
    count = positive_int(text)
    if not LEAST_REQUESTS <= count <= SAMPLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not within {LEAST_REQUESTS} … {SAMPLES}")
    return count


def _target(text: str) -> float:
    """Convert milliseconds to seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= MOST_TARGET:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 0 … {MOST_TARGET:g} ms")
    return value / 1e3


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value
