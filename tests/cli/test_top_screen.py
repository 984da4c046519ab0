"""Layout of ``pdserve top`` for arbitrary reports."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.top.screen import clean, fit, screen, sparkline
from router.dashboard.live import (
    LiveConnection,
    LiveHandoffs,
    LiveHistory,
    LiveModel,
    LiveNode,
    LiveNodeStats,
    LiveNow,
    LiveReport,
    LiveTraffic,
    Quantiles,
)

TRAFFIC = LiveTraffic(0, 0, 0.0, 0.0, 0.0, 0.0, None, {}, Quantiles(), Quantiles())
NO_HISTORY = LiveHistory(*([] for _ in LiveHistory.__struct_fields__))

texts = st.text(max_size=120)
nodes = st.builds(
    LiveNode,
    name=texts,
    role=st.sampled_from(["prefill", "decode", "both"]),
    address=texts,
    model=texts,
    state=st.sampled_from(["ready", "stuck", "lost", "unheard of"]),
    lost_seconds=st.none() | st.floats(0, 1e6),
    running=st.integers(0, 10**6),
    total_blocks=st.integers(0, 10**6),
)
connections = st.builds(
    LiveConnection,
    texts,
    texts,
    st.sampled_from(["none", "unknown", "rdma"]),
    st.floats(0, 1e13),
    st.none(),
    st.just(0.0),
)


@given(st.lists(nodes, max_size=12), st.lists(connections, max_size=12), st.integers(60, 200), st.integers(20, 60))
def test_any_report_fits_the_terminal(
    some: list[LiveNode], reads: list[LiveConnection], width: int, height: int
) -> None:
    models = [LiveModel("m", 0, 0, 0, 0, False)]
    now = LiveNow("0", models, TRAFFIC, some, None, reads, len(reads), len(reads))
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen(LiveReport("", now, NO_HISTORY), "http://r", width, height))
    lines = captured.get().splitlines()
    assert len(lines) <= height
    assert not any(character in line for line in lines for character in "\x1b\x07\r\x9b")


@pytest.mark.parametrize("width", [60, 70, 79, 80])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int) -> None:
    times = Quantiles(0.165, 0.198)
    address = "127.0.0.1:42775"
    traffic = LiveTraffic(4321, 123, 45.6, 0.0, 12345.0, 98765.0, 0.5, {"ok": 9}, times, times)
    handoffs = LiveHandoffs(123456, 45.6, 0.0, 0.0, 0.0, 7.7e8, times)
    stats = LiveNodeStats(0, 12345.0, 12345.0, 0.94, None, None, None, None)
    load = {"running": 1234, "waiting": 999, "backlog_tokens": 12345, "step_seconds": 0.0123, "total_blocks": 9}
    nodes = [LiveNode("", role, address, "m", "ready", stats=stats, **load) for role in ("prefill", "decode")]  # type: ignore[arg-type]
    reads = [LiveConnection(address, address, "unknown", 7.7e8, 5.5e8, 0.0)]
    now = LiveNow("0", [LiveModel("m", 1, 1, 1, 1, True)], traffic, nodes, handoffs, reads, 1, 1)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen(LiveReport("", now, NO_HISTORY), "http://127.0.0.1:8000", width))
    shown = captured.get()
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    for figure in (
        "4321 running, 123 waiting, 46/s finished",
        "next p50 165 ms, p99 198 ms",
        "123 k so far",
        "770 MB/s",
    ):
        assert figure in shown
    for figure in ("1,234", "999", "100 %", "12.3 k"):
        assert len(re.findall(rf"ready .* {figure}(?: |$)", shown, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("width", "host", "pulled", "shown"),
    [
        (80, 0.31, 0.22, "94 %"),
        (100, 0.31, 0.22, "94 %, host 31 %, pulled 22 %"),
        (100, None, 0.22, "94 %, pulled 22 %"),
        (100, 1.0, 1.0, "94 %, host 100 %, pulled 100 %"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_origins_of_cached_tokens_are_shown_where_they_fit(
    role: str, width: int, host: float | None, pulled: float | None, shown: str
) -> None:
    stats = LiveNodeStats(0, 12345.0, 12345.0, 0.94, host, pulled, None, None)
    load = {"running": 1234, "backlog_tokens": 12345, "step_seconds": 0.0123, "total_blocks": 9, "stats": stats}
    node = LiveNode("node-of-a-long-name", role, "a:1", "m", "connecting", **load)  # type: ignore[arg-type]
    now = LiveNow("0", [], TRAFFIC, [node], None, [], 0, 0)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen(LiveReport("", now, NO_HISTORY), "http://r", width))
    (row,) = (line for line in captured.get().splitlines() if "connecting" in line)
    assert row.startswith("node-of-a")
    assert row.endswith(f"  {shown}")


@given(texts)
def test_node_names_cannot_inject_terminal_codes(text: str) -> None:
    assert clean(text).isprintable()
    assert clean("d-one · ü日本") == "d-one · ü日本"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.integers(0, 100))
def test_tables_share_the_terminal_height(wanted: list[int], room: int) -> None:
    lengths = fit(wanted, room)
    assert sum(lengths) <= max(room, len(wanted))
    assert all(1 <= length <= max(1, most) for length, most in zip(lengths, wanted, strict=True))


@given(st.lists(st.none() | st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 100))
def test_sparkline_shows_its_maximum(values: list[float | None], columns: int) -> None:
    line, most = sparkline(values, columns)
    assert len(line) <= columns
    assert most == max((value for value in values if value is not None), default=0.0)
    assert ("█" in line) == (most > 0)
