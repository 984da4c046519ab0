"""What ``pdserve top`` shows of a report: rows that fit into 80 columns, and use more where there are more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.live import LiveHistory, LiveLink, LiveModel, LiveNode, LiveNow, LiveReport, Quantiles
from pdserve.top.numbers import UNKNOWN, age, bytes_per_second, count, percent, rate, seconds

# A shape beside each word: colour is for those who see it.
_MARKS = {
    "ready": ("●", "green"),
    "loading": ("○", "yellow"),
    "connecting": ("○", "yellow"),
    "draining": ("◐", "yellow"),
    "stuck": ("▲", "bold yellow"),
    "lost": ("✖", "bold red"),
    "unreachable": ("✖", "bold red"),
    "unused": ("–", "dim"),
}
_LOW = 24  # lines, below which nodes matter more than the past
_GONE = ("lost", "unreachable")
_BARS = "▁▂▃▄▅▆▇█"

Item = TypeVar("Item")


def screen(report: LiveReport, where: str, width: int, height: int | None = None) -> RenderableType:
    """All of a report; ``height`` is how many lines there are, None: as many as it takes."""
    now = report.now
    head = _head(now, where)
    if height is None or height >= _LOW:
        head += _lines(report.history, width)
    prefills, decodes = ([node for node in now.nodes if node.role == role] for role in ("prefill", "decode"))
    wanted = [len(prefills), len(decodes), len(now.links)]
    lengths = wanted if height is None else fit(wanted, height - len(head) - 2 * len(wanted))  # a title and a blank
    several = len(now.models) > 1
    tables = (
        _nodes("prefill", prefills, several, lengths[0]),
        _nodes("decode", decodes, several, lengths[1]),
        _links(now.links, lengths[2]),
    )
    return Group(*head, *(part for table in tables for part in (Text(), table)))


def fit(wanted: Sequence[int], room: int) -> list[int]:
    """How many lines each table gets: what it wants, or the longest ones less. One each at least."""
    lengths = [max(1, length) for length in wanted]
    while sum(lengths) > max(room, len(lengths)):
        lengths[lengths.index(max(lengths))] -= 1
    return lengths


def clean(text: str) -> str:
    """A name that a node has given itself must not move the cursor."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _head(now: LiveNow, where: str) -> list[Text]:
    traffic, handoffs = now.traffic, now.handoffs
    ready = sum(node.state == "ready" for node in now.nodes)
    well = "green" if ready == len(now.nodes) > 0 else "bold yellow"
    title = Text.assemble(("pdserve", "bold"), f"  {where}  ", (f"{ready} of {len(now.nodes)} nodes ready", well))
    requests = f"requests {traffic.running} running, {traffic.waiting} waiting, {rate(traffic.request_rate)}/s finished"
    tokens = f"tokens {rate(traffic.output_token_rate)}/s out, {rate(traffic.prompt_token_rate)}/s in"
    kinds = ", ".join(f"{number} {name}" for name, number in traffic.outcomes.items() if name != "ok")
    failed = Text.assemble((f"failed   {rate(traffic.failure_rate)}/s", "bold red" if traffic.failure_rate else ""))
    failed.append(f", in a minute {kinds or 'none'}")
    hands = UNKNOWN
    if handoffs is not None:
        hands = f"{_times(handoffs.exposed)}   {rate(handoffs.rate)}/s, {rate(handoffs.failure_rate)}/s failed"
    return [
        _line(title),
        *(_line(_model(model)) for model in now.models),
        _line(Text(f"{requests}   {tokens}")),
        _line(failed),
        _line(Text(f"first    {_times(traffic.ttft)}   next {_times(traffic.itl)}")),
        _line(Text(f"handoff  {hands}")),
    ]


def _model(model: LiveModel) -> Text:
    nodes = f"  {model.prefill_ready} of {model.prefill} prefill, {model.decode_ready} of {model.decode} decode"
    if model.decode_ready:
        return Text.assemble((clean(model.name), "bold"), _part(nodes))
    return Text.assemble((clean(model.name), "bold red"), _part(nodes), ("  not served", "bold red"))


def _part(text: str) -> tuple[str, str]:
    return text, "dim"


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _times(times: Quantiles) -> str:
    return f"p50 {seconds(times.p50)}, p99 {seconds(times.p99)}"


def _lines(history: LiveHistory, width: int) -> list[Text]:
    """The time until now, a character for some seconds of it."""
    if len(history.seconds) < 2:
        return []
    columns = width - 34
    shown = (
        ("output tokens/s", history.output_tokens, rate),
        ("first token p99", history.ttft_p99, seconds),
    )
    found = []
    for title, values, text in shown:
        line, most = sparkline(values, columns)
        label = f"  up to {text(most)}" if most else ""
        found.append(_line(Text.assemble(f"{title:16}", (line, "cyan"), _part(label))))
    return found


def sparkline(values: Sequence[float | None], columns: int) -> tuple[str, float]:
    """The highest values of even parts of the time, as bars, and the highest of all. Nothing is a blank."""
    size = max(1, -(-len(values) // columns))
    end = len(values) % size or size  # the first part may be smaller: the last one ends now
    cuts = [0, *range(end, len(values), size), len(values)]
    parts = [[v for v in values[low:high] if v is not None] for low, high in pairwise(cuts)]
    highest = [max(part) if part else None for part in parts]
    most = max((value for value in highest if value is not None), default=0.0)
    top = most or 1.0
    bars = (" " if value is None else _BARS[round(value / top * (len(_BARS) - 1))] for value in highest)
    return "".join(bars), most


def _nodes(role: str, nodes: Sequence[LiveNode], shows_model: bool, length: int) -> Table:
    last = ("prompt/s", "backlog") if role == "prefill" else ("output/s", "step")
    table = _table(f"{role} nodes", "state", "run", "wait", "KV", *last, "cached")
    for node in _shown(nodes, length):
        mark, style = _MARKS.get(node.state, ("?", "yellow"))
        state = node.state if node.lost_seconds is None else f"{node.state} {age(node.lost_seconds)}"
        name = clean(node.name or node.address) + (f" ({clean(node.model)})" if shows_model and node.model else "")
        table.add_row(Text(name), Text(f"{mark} {clean(state)}", style), *_figures(node))
    _end(table, nodes, length)
    return table


def _figures(node: LiveNode) -> list[str]:
    if node.state in _GONE:
        return [UNKNOWN] * 6
    its = node.measured
    used = 1 - node.free_blocks / node.total_blocks if node.total_blocks else None
    if node.role == "prefill":
        last = [rate(its.prompt_token_rate if its else None), count(node.backlog_tokens)]
    else:
        last = [rate(its.output_token_rate if its else None), seconds(node.step_seconds)]
    cached = percent(its.cached_share if its else None)
    return [count(node.running), count(node.waiting), percent(used), *last, cached]


def _links(links: Sequence[LiveLink], length: int) -> Table:
    table = _table("handoffs", "transport", "traffic", "while reading")
    for link in _shown(links, length):
        connected = link.transport != "none"
        mark, style = _MARKS["ready" if connected else "lost"]
        text = {"none": "not connected", "unknown": "connected"}.get(link.transport, clean(link.transport))
        table.add_row(
            Text(f"{clean(link.prefill)} → {clean(link.decode)}"),
            Text(f"{mark} {text}", style),
            bytes_per_second(link.byte_rate),
            bytes_per_second(link.speed),
        )
    _end(table, links, length)
    return table


def _table(first: str, second: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
    table.add_column(first, ratio=1, no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column(second, no_wrap=True, min_width=12)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    return table


def _shown(items: Sequence[Item], length: int) -> Sequence[Item]:
    """The first ones, which are those that are not well, with a line left for ``_end`` where it needs one."""
    return items if len(items) <= length else items[: length - 1]


def _end(table: Table, items: Sequence[object], length: int) -> None:
    if not items:
        table.add_row(Text("none", "dim"))
    elif hidden := len(items) - len(_shown(items, length)):
        table.add_row(Text(f"… and {hidden} more", "dim"))
