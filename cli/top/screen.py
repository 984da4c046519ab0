"""The layout of ``pdserve top``: rows that fit into 80 columns and use more if available; 60 show fewer figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.numbers import UNKNOWN, age, bytes_per_second, count, percent, rate, seconds
from router.dashboard.live import LiveConnection, LiveHistory, LiveModel, LiveNode, LiveNow, LiveReport, Quantiles

# State marks differ in shape, not only in colour.
_MARKS = {
    "ready": ("●", "green"),
    "loading": ("○", "yellow"),
    "connecting": ("○", "yellow"),
    "draining": ("◐", "yellow"),
    "asleep": ("–", "dim"),
    "stuck": ("▲", "bold yellow"),
    "lost": ("✖", "bold red"),
    "unreachable": ("✖", "bold red"),
    "faulty": ("✖", "bold red"),
    "unused": ("–", "dim"),
}
_MIN_HISTORY_HEIGHT = 24  # lines; a lower screen shows no history
_MIN_FULL_WIDTH = 80  # columns; tables of a narrower screen leave out their last figures
_MIN_ORIGIN_WIDTH = 100  # columns; a narrower screen does not say where cached tokens came from
_GONE = ("lost", "unreachable", "faulty")
_BARS = "▁▂▃▄▅▆▇█"

Item = TypeVar("Item")


def screen(report: LiveReport, url: str, width: int, height: int | None = None) -> RenderableType:
    """Render a report in ``height`` lines; None: unlimited."""
    now = report.now
    head = _header(now, url, width)
    if height is None or height >= _MIN_HISTORY_HEIGHT:
        head += _sparklines(report.history, width)
    roles = _roles(now.nodes)
    wanted = [*map(len, roles.values()), len(now.connections)]
    lengths = wanted if height is None else fit(wanted, height - len(head) - 2 * len(wanted))  # a title and a blank
    several = len(now.models) > 1
    tables = [
        _nodes(role, nodes, several, length, width)
        for (role, nodes), length in zip(roles.items(), lengths, strict=False)
    ]
    tables.append(_connections(now.connections, lengths[-1], width))
    return Group(*head, *(part for table in tables for part in (Text(), table)))


def _roles(nodes: Sequence[LiveNode]) -> dict[str, list[LiveNode]]:
    """Nodes by role; with nodes of both roles, without the roles that have none."""
    by_role = {role: [node for node in nodes if node.role == role] for role in ("prefill", "decode", "both")}
    if not by_role["both"]:
        del by_role["both"]
        return by_role
    return {role: listed for role, listed in by_role.items() if listed}


def fit(wanted: Sequence[int], room: int) -> list[int]:
    """Lines per table: as wanted, or fewer for the longest tables; at least one each."""
    lengths = [max(1, length) for length in wanted]
    while sum(lengths) > max(room, len(lengths)):
        lengths[lengths.index(max(lengths))] -= 1
    return lengths


def clean(text: str) -> str:
    """Replace control characters: nodes choose their own names."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _header(now: LiveNow, url: str, width: int) -> list[Text]:
    traffic = now.traffic
    handoffs = now.handoffs
    ready = sum(node.state == "ready" for node in now.nodes)
    style = "green" if ready == len(now.nodes) > 0 else "bold yellow"
    title = Text.assemble(("pdserve", "bold"), f"  {url}  ", (f"{ready} of {len(now.nodes)} nodes ready", style))
    requests = f"requests {traffic.running} running, {traffic.waiting} waiting, {rate(traffic.request_rate)}/s finished"
    tokens = f"tokens {rate(traffic.output_token_rate)}/s out, {rate(traffic.prompt_token_rate)}/s in"
    kinds = ", ".join(f"{number} {name}" for name, number in traffic.outcomes.items() if name != "ok")
    failed = Text.assemble((f"failed   {rate(traffic.failure_rate)}/s", "bold red" if traffic.failure_rate else ""))
    failed.append(f", in a minute {kinds or 'none'}")
    handoff = [f"handoff  {UNKNOWN}"]
    if handoffs is not None:
        rates = f"{rate(handoffs.rate)}/s, {rate(handoffs.failure_rate)}/s failed"
        handoff = [f"handoff  {_times(handoffs.exposed)}", f"{count(handoffs.total)} so far, {rates}"]
    return [
        _line(title),
        *(_line(_model(model)) for model in now.models),
        *_lines([requests, tokens], width),
        _line(failed),
        *_lines([f"first    {_times(traffic.ttft)}", f"next {_times(traffic.itl)}"], width),
        *_lines(handoff, width),
    ]


def _model(model: LiveModel) -> Text:
    counts = [(model.prefill_ready, model.prefill, "prefill"), (model.decode_ready, model.decode, "decode")]
    if model.both:
        counts = [*(entry for entry in counts if entry[1]), (model.both_ready, model.both, "both")]
    nodes = "  " + ", ".join(f"{ready} of {total} {role}" for ready, total, role in counts)
    if model.served:
        return Text.assemble((clean(model.name), "bold"), _part(nodes))
    return Text.assemble((clean(model.name), "bold red"), _part(nodes), ("  not served", "bold red"))


def _part(text: str) -> tuple[str, str]:
    return text, "dim"


def _lines(parts: Sequence[str], width: int) -> list[Text]:
    """Return the parts in one line, or each in its own if the screen is too narrow."""
    joined = "   ".join(parts)
    return [_line(Text(text)) for text in ([joined] if len(joined) <= width else parts)]


def _line(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


def _times(times: Quantiles) -> str:
    return f"p50 {seconds(times.p50)}, p99 {seconds(times.p99)}"


def _sparklines(history: LiveHistory, width: int) -> list[Text]:
    if len(history.seconds) < 2:
        return []
    columns = width - 34
    rows = ("output tokens/s", history.output_tokens, rate), ("first token p99", history.ttft_p99, seconds)
    lines = []
    for title, values, text in rows:
        line, most = sparkline(values, columns)
        label = f"  up to {text(most)}" if most else ""
        lines.append(_line(Text.assemble(f"{title:16}", (line, "cyan"), _part(label))))
    return lines


def sparkline(values: Sequence[float | None], columns: int) -> tuple[str, float]:
    """Bars of the maxima of equal parts of the time, and the overall maximum. A blank means no value."""
    size = max(1, -(-len(values) // columns))
    end = len(values) % size or size  # only the first part may be smaller
    cuts = [0, *range(end, len(values), size), len(values)]
    parts = [[v for v in values[low:high] if v is not None] for low, high in pairwise(cuts)]
    highest = [max(part) if part else None for part in parts]
    most = max((value for value in highest if value is not None), default=0.0)
    top = most or 1.0
    bars = (" " if value is None else _BARS[round(value / top * (len(_BARS) - 1))] for value in highest)
    return "".join(bars), most


def _nodes(role: str, nodes: Sequence[LiveNode], shows_model: bool, length: int, width: int) -> Table:
    last = ("prompt/s", "backlog") if role == "prefill" else ("output/s", "step")
    title = "nodes of both roles" if role == "both" else f"{role} nodes"
    columns = ("run", "wait", "KV", *last, "cached")[: _num_figures(width)]
    table = _table(title, "state", *columns)
    for node in _visible(nodes, length):
        mark, style = _MARKS.get(node.state, ("?", "yellow"))
        state = node.state if node.lost_seconds is None else f"{node.state} {age(node.lost_seconds)}"
        name = clean(node.name or node.address) + (f" ({clean(node.model)})" if shows_model and node.model else "")
        figures = _figures(node, width)[: len(columns)]
        table.add_row(Text(name), Text(f"{mark} {clean(state)}", style), *figures)
    _add_footer(table, nodes, length)
    return table


def _num_figures(width: int) -> int | None:
    """Return the figures of a node that fit; None: all."""
    return None if width >= _MIN_FULL_WIDTH else 4


def _figures(node: LiveNode, width: int) -> list[str]:
    if node.state in _GONE:
        return [UNKNOWN] * 6
    stats = node.stats
    used = 1 - node.free_blocks / node.total_blocks if node.total_blocks else None
    if node.role == "prefill":
        last = [rate(stats.prompt_token_rate if stats else None), count(node.backlog_tokens)]
    else:
        last = [rate(stats.output_token_rate if stats else None), seconds(node.step_seconds)]
    cached = percent(stats.cached_share if stats else None)
    if stats and width >= _MIN_ORIGIN_WIDTH:
        cached += f", host {percent(stats.host_share)}" if stats.host_share else ""
        cached += f", pulled {percent(stats.pulled_share)}" if stats.pulled_share else ""
    return [count(node.running), count(node.waiting), percent(used), *last, cached]


def _connections(connections: Sequence[LiveConnection], length: int, width: int) -> Table:
    columns = ("traffic", "while reading") if width >= _MIN_FULL_WIDTH else ("traffic",)
    table = _table("handoffs", "transport", *columns)
    for connection in _visible(connections, length):
        connected = connection.transport != "none"
        mark, style = _MARKS["ready" if connected else "lost"]
        text = {"none": "not connected", "unknown": "connected"}.get(connection.transport, clean(connection.transport))
        ends = Text(f"{clean(connection.prefill)} → {clean(connection.decode)}")
        figures = [bytes_per_second(connection.byte_rate), bytes_per_second(connection.throughput)][: len(columns)]
        table.add_row(ends, Text(f"{mark} {text}", style), *figures)
    _add_footer(table, connections, length)
    return table


def _table(first: str, second: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
    table.add_column(first, ratio=1, no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column(second, no_wrap=True, min_width=12)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    return table


def _visible(items: Sequence[Item], length: int) -> Sequence[Item]:
    """The first items, with a line left for the footer if items are hidden. Nodes that are not ready come first."""
    return items if len(items) <= length else items[: length - 1]


def _add_footer(table: Table, items: Sequence[object], length: int) -> None:
    if not items:
        table.add_row(Text("none", "dim"))
    elif hidden := len(items) - len(_visible(items, length)):
        table.add_row(Text(f"… and {hidden} more", "dim"))
