"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

import msgspec

from cli.numbers import counted, figure, percentile
from cli.plan.prediction import PlannedLoad, Prediction
from cli.plan.sizing import Fleet, Plan


class PredictionErrors(msgspec.Struct, frozen=True):
    """Predicted / measured - 1: the least and the largest error over all fleets of ``command``."""

    ttft_p50: tuple[float, float]
    ttft_p99: tuple[float, float]
    per_token_p50: tuple[float, float]
    per_token_p99: tuple[float, float]
    command: str
    hardware: str
    commit: str


#: Fleets that serve their load, 5 to 24 requests/s; near overload, queues depend on a few percent of the costs.
PREDICTION_ERRORS = PredictionErrors(
    ttft_p50=(-0.15, 0.24),
    ttft_p99=(-0.15, 0.24),
    per_token_p50=(-0.02, 0.12),
    per_token_p99=(-0.04, 0.43),
    command="bench/plan_check.py --measured",
    hardware="two H200s, 8B",
    commit="2d560924",
)

_PROVENANCE = ("model", "gpu", "hardware", "commit", "command", "estimated")


def as_json(load: PlannedLoad, plan: Plan) -> dict[str, Any]:
    """Return plain values in seconds, requests/s, tokens/s and 10^9 bytes/s."""
    costs = load.costs
    workload = load.workload
    split = plan.split
    prediction = split.prediction
    most_batch, most_by = load.max_batch
    return {
        "rate": plan.rate,
        "prefill": {
            "nodes": split.layout.prefill,
            "utilisation": prediction.prefill_busy,
            "kv_gb_per_s": _sent(prediction),
            "ttft": _keys(prediction.ttft),
        },
        "decode": {
            "nodes": split.layout.decode,
            "utilisation": prediction.decode_busy,
            "kv_gb_per_s": prediction.read_gb_per_s,
            "itl": _keys(prediction.itl),
            "mean_batch": prediction.mean_batch,
            "most_batch": most_batch,
            "most_by": most_by,
        },
        "prefill_needs": plan.prefill_needs,
        "decode_needs": plan.decode_needs,
        "handoffs": prediction.handoffs,
        "aggregated": _fleet(plan.aggregated),
        "aggregated_lacks": "" if plan.aggregated else plan.aggregated_lacks,
        "elastic": _fleet(plan.elastic),
        "elastic_lacks": "" if plan.elastic else plan.elastic_lacks,
        "gpus": plan.nodes * costs.gpus,
        "gpus_aggregated": None if plan.aggregated is None else plan.aggregated.layout.nodes * costs.gpus,
        "gpus_elastic": None if plan.elastic is None else plan.elastic.layout.nodes * costs.gpus,
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


def _fleet(fleet: Fleet | None) -> dict[str, Any] | None:
    if fleet is None:
        return None
    prediction = fleet.prediction
    return {
        "nodes": fleet.layout.nodes,
        "utilisation": prediction.decode_busy,
        "ttft": _keys(prediction.ttft),
        "itl": _keys(prediction.itl),
        "mean_batch": prediction.mean_batch,
        "handoffs": prediction.handoffs,
    }


def _keys(times: Mapping[int, float]) -> dict[str, float]:
    return {str(percent): seconds for percent, seconds in times.items()}


def _sent(prediction: Prediction) -> float:
    """Return the KV that leaves each prefill node, in 10^9 bytes per second: what all decode nodes read."""
    layout = prediction.layout
    return prediction.read_gb_per_s * layout.decode / layout.prefill


def as_text(load: PlannedLoad, plan: Plan) -> str:
    costs = load.costs
    layout = plan.split.layout
    gpus = plan.nodes * costs.gpus
    errors, measured = _errors()
    rows = [
        ("costs", f"{costs.model} on {costs.gpu}, nodes of {counted(costs.gpus, 'GPU')}, measured at {costs.commit}"),
        *(("estimated", text) for text in costs.estimated),
        ("error", errors),
        ("", measured),
        ("workload", f"{figure(plan.rate)} requests/s"),
        ("", _lengths("prompts", load.workload.prompts) + f", {_cached(load):.0%} cached"),
        ("", _lengths("outputs", load.workload.outputs)),
        ("slo", ", ".join([*_asked("TTFT", load.slo.ttft), *_asked("ITL", load.slo.itl)]) or "none"),
        *(("overload", text) for text in _overload(load)),
    ]
    lines = [f"{name:<10}{text}" for name, text in rows]
    return "\n".join(
        [
            *lines,
            "",
            f"P:D = {_ratio(plan)}: {layout.prefill:,} prefill and {counted(layout.decode, 'decode node')}, "
            f"{gpus:,} GPUs, with {load.limits.headroom:.0%} headroom",
            "",
            *_table(load, plan),
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
    errors = PREDICTION_ERRORS

    def span(bounds: tuple[float, float]) -> str:
        return " … ".join(f"{bound:+.0%}" for bound in bounds)

    return (
        f"TTFT p50 {span(errors.ttft_p50)}, p99 {span(errors.ttft_p99)}; "
        f"time per token p50 {span(errors.per_token_p50)}, p99 {span(errors.per_token_p99)}",
        f"of predictions for {errors.hardware}, at {errors.commit}; none for other models, GPUs or more nodes",
    )


def _lengths(what: str, values: tuple[int, ...]) -> str:
    mean = sum(values) / len(values)
    return f"{what} of {mean:,.0f} tokens (p50 {percentile(values, 50):,}, p99 {percentile(values, 99):,})"


def _cached(load: PlannedLoad) -> float:
    return sum(load.workload.cached) / sum(load.workload.prompts)


def _asked(what: str, slo: Mapping[int, float]) -> Iterator[str]:
    return (f"{what} p{percent} at most {_ms(seconds)}" for percent, seconds in slo.items())


def _overload(load: PlannedLoad) -> Iterator[str]:
    """Yield the limits that stand in for a missing SLO."""
    limits = [] if load.slo.ttft else [*_asked("TTFT", load.ttft_limits)]
    limits += [] if load.slo.itl else [*_asked("ITL", load.itl_limits)]
    if limits:
        yield f"none while {' and '.join(limits)}".replace("at most", "is at most")


def _ratio(plan: Plan) -> str:
    layout = plan.split.layout
    common = gcd(layout.prefill, layout.decode)
    return f"{layout.prefill // common}:{layout.decode // common}"


def _ms(seconds: float) -> str:
    return f"{figure(1e3 * seconds)} ms" if seconds < 0.9995 else f"{figure(seconds)} s"


def _table(load: PlannedLoad, plan: Plan) -> Iterator[str]:
    row = "{:<11}{:>6}{:>6}{:>7}{:>10}{:>10}{:>10}{:>10}{:>16}{:>10}".format
    gpus = load.costs.gpus
    most, _ = load.max_batch

    def times(seconds: Mapping[int, float]) -> list[str]:
        return [_ms(seconds[percent]) for percent in (50, 99)]

    def traffic(gb_per_s: float) -> str:
        return figure(gb_per_s) if gb_per_s else ""

    yield row("", "nodes", "GPUs", "busy", "TTFT p50", "p99", "ITL p50", "p99", "decode batch", "KV, GB/s")
    split = plan.split.prediction
    nodes = plan.split.layout.prefill
    yield row(
        "prefill",
        nodes,
        nodes * gpus,
        f"{split.prefill_busy:.0%}",
        *times(split.ttft),
        "",
        "",
        "",
        traffic(_sent(split)),
    )
    fleets = {"aggregated": plan.aggregated, "elastic": plan.elastic}
    rows = [("decode", plan.split.layout.decode, split, ["", ""])]
    rows += [
        (name, fleet.layout.nodes, fleet.prediction, times(fleet.prediction.ttft))
        for name, fleet in fleets.items()
        if fleet is not None
    ]
    for name, nodes, prediction, ttft in rows:
        batch = f"{prediction.mean_batch:.0f} of {most}"
        busy = f"{prediction.decode_busy:.0%}"
        kv = traffic(prediction.read_gb_per_s)
        yield row(name, nodes, nodes * gpus, busy, *ttft, *times(prediction.itl), batch, kv)


def _notes(load: PlannedLoad, plan: Plan) -> Iterator[str]:
    count = plan.nodes * load.costs.gpus
    tokens = plan.rate * load.workload.mean_output
    yield f"each GPU serves {figure(plan.rate / count)} requests/s and {tokens / count:,.0f} output tokens/s"
    room = f"{load.costs.kv_tokens:,} tokens of KV, {load.costs.shape.kv_bytes / 1024:.0f} KiB each"
    if load.costs.shape.state_bytes:
        room += f", and {load.costs.shape.state_bytes / 2**20:.0f} MiB of recurrent state per sequence"
    most_batch, most_by = load.max_batch
    yield f"each decode node holds {room}: about {most_batch} sequences, limited by {most_by}"
    prediction = plan.split.prediction
    most = max(_sent(prediction), prediction.read_gb_per_s)
    yield f"prefill nodes compute {prediction.handoffs:.0%} of the prompts, the decode nodes the others"
    yield f"KV traffic into or out of a node is {figure(most)} GB/s on average, of the network's {figure(load.network)}"
    layout = plan.split.layout
    roles = ("prefill", layout.prefill, plan.prefill_needs), ("decode", layout.decode, plan.decode_needs)
    for role, nodes, needs in roles:
        if nodes > 1 and needs:
            yield f"with one {role} node fewer, the bottleneck would be {needs}"
    simulated = prediction.layout
    if simulated != plan.split.layout:
        yield f"simulated: {simulated} with {figure(prediction.rate)} requests/s, one of several such fleets"


def _verdict(load: PlannedLoad, plan: Plan) -> Iterator[str]:
    gpus = load.costs.gpus
    if plan.aggregated is None:
        yield f"disaggregate: aggregated nodes cannot serve this load; bottleneck {plan.aggregated_lacks}"
        return
    nodes = plan.aggregated.layout.nodes
    if _split_is_better(plan):
        yield f"disaggregate: aggregated nodes would take {nodes * gpus:,} GPUs instead of {plan.nodes * gpus:,}"
        return
    suffices = "suffices" if nodes * gpus == 1 else "suffice"
    yield (
        f"do not disaggregate: {counted(nodes * gpus, 'GPU')} of aggregated nodes {suffices}, "
        f"{f'not {plan.nodes * gpus:,}' if plan.nodes > nodes else 'too'}; start decode nodes without prefill nodes"
    )
    if not load.slo.itl:
        yield "(disaggregation improves the tail of ITL: set --slo itl:p99=… if it matters)"


def _elastic_verdict(load: PlannedLoad, plan: Plan) -> Iterator[str]:
    if plan.elastic is None or plan.elastic.layout.nodes < 2:
        return
    nodes = plan.elastic.layout.nodes
    gpus = nodes * load.costs.gpus
    others = [plan.nodes]
    if plan.aggregated is not None:
        others.append(plan.aggregated.layout.nodes)
    if nodes <= min(others):
        yield f"best: {gpus:,} GPUs of elastic nodes, whose roles follow the load; start them with `pdserve serve`"
    else:
        yield f"elastic nodes, whose roles follow the load, would take {gpus:,} GPUs"


def _split_is_better(plan: Plan) -> bool:
    return plan.aggregated is None or plan.nodes < plan.aggregated.layout.nodes


def _doubts(load: PlannedLoad, plan: Plan) -> Iterator[str]:
    """Yield where the plan extrapolates beyond the measured costs, or beyond what a virtual fleet models."""
    costs = load.costs
    longest = percentile(load.workload.prompts, 99)
    measured = costs.prefill_ms[-1][0]
    if longest > measured:
        yield f"1 % of the prompts exceed {longest:,} tokens; the longest measured one has {measured:,.0f}"
    mean_batch = plan.split.prediction.mean_batch
    if mean_batch > costs.decode_ms[-1][0]:
        yield f"the mean decode batch is {mean_batch:.0f}; at most {costs.decode_ms[-1][0]:.0f} measured"
    if costs.under_load is None:
        yield "the costs were measured step by step; steps of serving nodes took about a tenth longer where compared"
    if costs.pp > 1:
        yield "the stages of a node are simulated as one device"
