"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

import msgspec

from cli.numbers import counted, figure
from cli.plan.node_load import NodeLoad
from cli.plan.queues import percentile
from cli.plan.sizing import Plan


class PredictionErrors(msgspec.Struct, frozen=True):
    """Predicted / measured - 1: the least and the largest error over all workloads of ``command``."""

    ttft_p50: tuple[float, float]
    ttft_p90: tuple[float, float]
    itl_p50: tuple[float, float]
    itl_p99: tuple[float, float]
    command: str
    hardware: str
    commit: str


#: The errors of the formulas in ``queues.py`` and ``node_load.py``. The p99 of TTFT has not been compared: a few
#: hundred requests give no reliable one.
PREDICTION_ERRORS = PredictionErrors(
    ttft_p50=(-0.49, 0.47),
    ttft_p90=(-0.52, 0.49),
    itl_p50=(-0.30, 0.04),
    itl_p99=(-0.72, -0.01),
    command="bench/plan_check.py --slower 8; bench/plan_check.py --model MODEL --costs costs.toml --requests 100",
    hardware="simulated nodes, CPU nodes on two cores",
    commit="1b94793, 23faa4a",
)

_PROVENANCE = ("model", "gpu", "hardware", "commit", "command", "estimated")


def as_json(load: NodeLoad, plan: Plan) -> dict[str, Any]:
    """Return plain values in seconds, requests/s, tokens/s and 10^9 bytes/s."""
    costs, workload = load.costs, load.workload
    found: dict[str, Any] = msgspec.to_builtins(plan, str_keys=True)
    return found | {
        "gpus": plan.nodes * costs.gpus,
        "gpus_aggregated": None if plan.aggregated is None else plan.aggregated.nodes * costs.gpus,
        "gpus_elastic": None if plan.elastic is None else plan.elastic.nodes * costs.gpus,
        "requests_per_s_per_gpu": plan.rate / plan.nodes / costs.gpus,
        "output_tokens_per_s_per_gpu": plan.rate * workload.mean_output / plan.nodes / costs.gpus,
        "kv_bytes_per_token": costs.shape.kv_bytes,
        "state_bytes_per_sequence": costs.shape.state_bytes,
        "network_gb_per_s": load.network,
        "worthwhile": _split_is_better(plan),
        "prediction_errors": msgspec.to_builtins(PREDICTION_ERRORS),
        "costs": {name: getattr(costs, name) for name in _PROVENANCE},
        "doubts": list(_doubts(load, plan)),
    }


def as_text(load: NodeLoad, plan: Plan) -> str:
    costs = load.costs
    gpus = plan.nodes * costs.gpus
    rows = [
        ("costs", f"{costs.model} on {costs.gpu}, nodes of {counted(costs.gpus, 'GPU')}, measured at {costs.commit}"),
        *(("estimated", text) for text in costs.estimated),
        *(("error" if first else "", text) for first, text in zip((True, False), _errors(), strict=True)),
        ("workload", f"{figure(plan.rate)} requests/s"),
        ("", _lengths("prompts", load.workload.prompts) + f", {_cached(load):.0%} cached"),
        ("", _lengths("outputs", load.workload.outputs)),
        ("slo", ", ".join([*_asked("TTFT", load.slo.ttft), *_asked("ITL", load.slo.itl)]) or "none"),
    ]
    lines = [f"{name:<10}{text}" for name, text in rows]
    return "\n".join(
        [
            *lines,
            "",
            f"P:D = {_ratio(plan)}: {plan.prefill.nodes:,} prefill and {counted(plan.decode.nodes, 'decode node')}, "
            f"{gpus:,} GPUs, with {load.limits.headroom:.0%} headroom",
            "",
            *_table(plan, costs.gpus),
            "",
            *_notes(load, plan),
            "",
            *_verdict(load, plan),
            *_elastic_verdict(load, plan),
            *(f"doubtful: {text}" for text in _doubts(load, plan)),
        ]
    )


def _errors() -> tuple[str, str]:
    """Return the prediction errors, and the nodes that they were measured on."""
    found = PREDICTION_ERRORS

    def span(bounds: tuple[float, float]) -> str:
        return " … ".join(f"{bound:+.0%}" for bound in bounds)

    return (
        f"TTFT p50 {span(found.ttft_p50)}, p90 {span(found.ttft_p90)}; "
        f"ITL p50 {span(found.itl_p50)}, p99 {span(found.itl_p99)}",
        f"of predictions for {found.hardware}, at {found.commit}; none for GPUs, none of TTFT p99",
    )


def _lengths(what: str, values: tuple[int, ...]) -> str:
    mean, half, most = sum(values) / len(values), percentile(values, 50), percentile(values, 99)
    return f"{what} of {mean:,.0f} tokens (p50 {half:,}, p99 {most:,})"


def _cached(load: NodeLoad) -> float:
    return sum(load.workload.cached) / sum(load.workload.prompts)


def _asked(what: str, slo: Mapping[int, float]) -> Iterator[str]:
    return (f"{what} p{percent} at most {_ms(seconds)}" for percent, seconds in slo.items())


def _ratio(plan: Plan) -> str:
    common = gcd(plan.prefill.nodes, plan.decode.nodes)
    return f"{plan.prefill.nodes // common}:{plan.decode.nodes // common}"


def _ms(seconds: float) -> str:
    return f"{figure(1e3 * seconds)} ms" if seconds < 0.9995 else f"{figure(seconds)} s"


def _table(plan: Plan, gpus: int) -> Iterator[str]:
    row = "{:<11}{:>6}{:>6}{:>7}{:>10}{:>10}{:>10}{:>10}{:>16}{:>10}".format
    yield row("", "nodes", "GPUs", "busy", "TTFT p50", "p99", "ITL p50", "p99", "decode batch", "KV, GB/s")
    named = [("prefill", plan.prefill), ("decode", plan.decode)]
    if plan.aggregated is not None:
        named.append(("aggregated", plan.aggregated))
    if plan.elastic is not None:
        named.append(("elastic", plan.elastic))
    for name, role in named:
        times = [_ms(of[percent]) if of else "" for of in (role.ttft, role.itl) for percent in (50, 99)]
        batch = f"{role.mean_batch:.0f} of {role.most_batch}" if role.most_batch else ""
        traffic = figure(role.kv_gb_per_s) if role.kv_gb_per_s else ""
        yield row(name, role.nodes, role.nodes * gpus, f"{role.utilisation:.0%}", *times, batch, traffic)


def _notes(load: NodeLoad, plan: Plan) -> Iterator[str]:
    count = plan.nodes * load.costs.gpus
    tokens = plan.rate * load.workload.mean_output
    yield f"each GPU serves {figure(plan.rate / count)} requests/s and {tokens / count:,.0f} output tokens/s"
    room = f"{load.costs.kv_tokens:,} tokens of KV, {load.costs.shape.kv_bytes / 1024:.0f} KiB each"
    if load.costs.shape.state_bytes:
        room += f", and {load.costs.shape.state_bytes / 2**20:.0f} MiB of recurrent state per sequence"
    yield f"each decode node holds {room}: at most {plan.decode.most_batch} sequences, limited by {plan.decode.most_by}"
    most = max(plan.prefill.kv_gb_per_s, plan.decode.kv_gb_per_s)
    yield f"KV traffic into or out of a node is at most {figure(most)} GB/s of the network's {figure(load.network)}"
    for name, role, needs in (
        ("prefill", plan.prefill, plan.prefill_needs),
        ("decode", plan.decode, plan.decode_needs),
    ):
        if role.nodes > 1:
            yield f"with one {name} node fewer, the bottleneck would be {needs}"
    limits = [
        (plan.prefill_carries, "prefill nodes", plan.prefill_lacks),
        (plan.decode_carries, "decode nodes", plan.decode_lacks),
    ]
    (first, name, lacks), (second, other, _) = sorted(limits)
    yield f"without headroom, {name} serve {figure(first)} requests/s, limited by {lacks}, and {other} {figure(second)}"


def _verdict(load: NodeLoad, plan: Plan) -> Iterator[str]:
    both, gpus = plan.aggregated, load.costs.gpus
    if both is None:
        yield f"disaggregate: aggregated nodes cannot serve this load; bottleneck {plan.aggregated_lacks}"
    elif _split_is_better(plan):
        yield f"disaggregate: aggregated nodes would take {both.nodes * gpus:,} GPUs instead of {plan.nodes * gpus:,}"
    else:
        found, fewer = counted(both.nodes * gpus, "GPU"), plan.nodes > both.nodes
        suffices = "suffices" if both.nodes * gpus == 1 else "suffice"
        yield (
            f"do not disaggregate: {found} of aggregated nodes {suffices}, "
            f"{f'not {plan.nodes * gpus:,}' if fewer else 'too'}; start decode nodes without prefill nodes"
        )
        if not load.slo.itl:
            yield "(disaggregation improves the tail of ITL: set --slo itl:p99=… if it matters)"


def _elastic_verdict(load: NodeLoad, plan: Plan) -> Iterator[str]:
    if plan.elastic is None or plan.elastic.nodes < 2:
        return
    gpus, others = plan.elastic.nodes * load.costs.gpus, [plan.nodes]
    if plan.aggregated is not None:
        others.append(plan.aggregated.nodes)
    if plan.elastic.nodes <= min(others):
        yield f"best: {gpus:,} GPUs of elastic nodes, whose roles follow the load; start them with `pdserve serve`"
    else:
        yield f"elastic nodes, whose roles follow the load, would take {gpus:,} GPUs"


def _split_is_better(plan: Plan) -> bool:
    return plan.aggregated is None or plan.nodes < plan.aggregated.nodes


def _doubts(load: NodeLoad, plan: Plan) -> Iterator[str]:
    """Yield where the plan extrapolates beyond the measured costs."""
    costs = load.costs
    longest, measured = percentile(load.workload.prompts, 99), costs.prefill_ms[-1][0]
    if longest > measured:
        yield f"1 % of the prompts exceed {longest:,} tokens; the longest measured one has {measured:,.0f}"
    if plan.decode.mean_batch > costs.decode_ms[-1][0]:
        yield f"the mean decode batch is {plan.decode.mean_batch:.0f}; at most {costs.decode_ms[-1][0]:.0f} measured"
