"""The command ``pdserve plan``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial

from cli.plan.costs import Costs, Shape, find_costs, load_costs
from cli.plan.flags import make_parser
from cli.plan.prediction import LoadLimits, PlannedLoad, Slo
from cli.plan.predictor import Predictor
from cli.plan.report import as_json, as_text
from cli.plan.sizing import plan_for_gpus, plan_for_rate
from cli.plan.workload import Workload, read_trace, workload_of, workload_of_trace
from pdserve.checkpoint.hub import resolve_model
from pdserve.config.resolution.limits import SEQUENCE_TOKENS, default_max_num_seqs
from pdserve.errors import ConfigError
from pdserve.host.process import run_command
from pdserve.model.model_config import load_model_config

_GPU = "h200"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: plan(make_parser().parse_args(argv)))


def plan(args: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError or CapacityError."""
    costs = _costs(args)
    workload, rate, draw = _workload(args)
    max_num_seqs = args.max_num_seqs or default_max_num_seqs(costs.kv_tokens / SEQUENCE_TOKENS)
    limits = LoadLimits(
        headroom=args.headroom,
        max_num_seqs=max_num_seqs,
        kv_gb_per_s=args.network or 0.0,
        requests=args.requests,
        itl_target=args.itl_target,
        ttft_target=args.ttft_target,
    )
    load = PlannedLoad(costs, workload, parse_slo(args.slo), limits, draw)
    if args.gpus is None and rate is None:
        raise ConfigError("neither --rate nor --gpus is set; set the request rate or the number of GPUs")
    with Predictor(load) as predictor:
        if args.gpus is not None:
            result = plan_for_gpus(predictor, args.gpus)
        else:
            assert rate is not None
            result = plan_for_rate(predictor, rate)
    print(json.dumps(as_json(load, result), indent=2) if args.json else as_text(load, result))
    return 0


def _costs(args: argparse.Namespace) -> Costs:
    if args.model is None and args.costs is None:
        raise ConfigError("neither MODEL nor --costs is set; name a checkpoint or measured costs")
    shape = None
    if args.model is not None:
        shape = Shape.of(load_model_config(resolve_model(args.model, weights=False)), args.kv_cache_dtype)
    if args.costs is None:
        assert shape is not None
        return find_costs(shape, args.gpu or _GPU, args.pp or 1, args.tp or 1)
    costs = load_costs(args.costs)
    for flag in ("gpu", "pp", "tp"):
        given = getattr(args, flag)
        measured = getattr(costs, flag)
        if given is not None and given != measured:
            raise ConfigError(f"--{flag} {given}: costs {args.costs} were measured with {measured}; remove one of them")
    if shape is not None and shape != costs.shape:
        raise ConfigError(f"costs {args.costs} are for {costs.shape}, {args.model} has {shape}; remove one of them")
    if shape is None and args.kv_cache_dtype != "auto" and costs.shape.kv_cache_dtype == "auto":
        raise ConfigError(
            f"costs {args.costs} were not measured with --kv-cache-dtype {args.kv_cache_dtype}; remove it"
        )
    return costs


def _workload(args: argparse.Namespace) -> tuple[Workload, float | None, Callable[[int], Workload] | None]:
    """Return the workload, its rate if there is one, and what draws samples of it; None: its first requests."""
    if args.rate is not None and args.gpus is not None:
        raise ConfigError("--rate and --gpus are both set; set only one")
    lengths = {"prompt-tokens": args.prompt_tokens, "output-tokens": args.output_tokens, "cached": args.cached}
    if args.trace is None:
        prompts, outputs, cached = lengths.values()
        draw = partial(workload_of, prompts or "2048", outputs or "256", cached or 0.0, seed=args.seed)
        return draw(), args.rate, draw
    for flag, value in lengths.items():
        if value is not None:
            raise ConfigError(f"--{flag} {value}: the requests of --trace have theirs; remove one of them")
    workload, rate = workload_of_trace(list(read_trace(args.trace)))
    return workload, args.rate or rate, None


def parse_slo(text: str) -> Slo:
    """Parse e.g. "ttft:p99=1s,itl:p50=10ms,itl:p99=30ms"; empty means no SLO. Raises ConfigError."""
    limits: dict[str, dict[int, float]] = {"ttft": {}, "itl": {}}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(ttft|itl):p(\d\d?)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if match is None or not int(match[2]) or not float(match[3]):
            raise ConfigError(f"slo {part!r} is invalid; use e.g. ttft:p99=1s or itl:p99=30ms")
        limits[match[1]][int(match[2])] = float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)
    return Slo(**limits)
