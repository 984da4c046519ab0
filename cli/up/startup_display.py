"""The output of ``pdserve up``: a live table while processes start on a terminal, else log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING

from cli.up.supervisor import Child
from pdserve.host.process import EXIT_REFUSED
from pdserve.logs import chosen_format, level_of, relayed_line, relayed_text, request_fields

if TYPE_CHECKING:
    from rich.table import Table

_log = logging.getLogger(__name__)

_STAGE_SECONDS = 10.0  # between lines of one stage


def starting_display(children: Sequence[Child]) -> Display:
    """Choose the display of a start, for stderr and the log format. ``children`` may grow later."""
    if chosen_format() == "json":
        return JsonDisplay(starting=True)
    return LiveDisplay(children) if sys.stderr.isatty() else Display(starting=True)


def serving_display() -> Display:
    """Choose the display after the start."""
    return JsonDisplay() if chosen_format() == "json" else Display()


class Display:
    """Print a line per stage of a start and per child that is ready, and relay output without its routine lines."""

    def __init__(self, starting: bool = False) -> None:
        self._starting = starting
        self._failed: Child | None = None  # first child that reported a failure
        self._stages: dict[str, tuple[str, float]] = {}  # by child: stage of the last line, and the line's time

    def changed(self, child: Child) -> None:
        if child.state == "failed" and self._failed is None:
            self._failed = child
        self._show(child)

    def _show(self, child: Child) -> None:
        if child.state == "ready":
            tokens = f", {child.kv_tokens:,} KV tokens" if child.kv_tokens else ""
            text = f"{child.name} is ready after {child.ready_at - child.started:.1f} s on {child.address}{tokens}"
            _log.info("%s", text, extra=request_fields("", child=child.name))
        elif child.state == "loading" and self._starting:
            self._show_stage(child)

    def _show_stage(self, child: Child) -> None:
        """Print a stage when it begins, and again while it takes long."""
        stage, printed_at = self._stages.get(child.name, ("", 0.0))
        now = time.monotonic()
        if child.stage != stage or now > printed_at + _STAGE_SECONDS:
            self._stages[child.name] = child.stage, now
            done = f", {child.fraction:.0%}" if child.fraction >= 0 else ""
            _log.info("%s: %s%s", child.name, child.stage, done, extra=request_fields("", child=child.name))

    def printed(self, child: Child, text: str) -> None:
        if self._tells_more(child, text) and not (self._is_starting(child) and _is_routine(text)):
            self._print(child, text)

    def _is_starting(self, child: Child) -> bool:
        return self._starting or child.state != "ready"

    def _tells_more(self, child: Child, text: str) -> bool:
        """Return whether a line says more than the failure that ``up`` is going to print."""
        follows = self._starting and self._failed not in (None, child)  # the other processes lose the failed one
        return not follows and not child.has_reported(text)

    def _print(self, child: Child, text: str) -> None:
        print(relayed_text(text, child.name), file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Called periodically."""

    def close(self) -> None:
        """Called once all children are ready or one has failed."""


def _is_routine(text: str) -> bool:
    """Return whether a log line only describes the start. ``--log-level debug`` shows these lines, too."""
    return level_of(text) == "INFO" and not _log.isEnabledFor(logging.DEBUG)


class JsonDisplay(Display):
    """Relay the children's log lines as JSON lines of one log."""

    def _is_starting(self, child: Child) -> bool:
        return False  # routine lines are for the log, too

    def _print(self, child: Child, text: str) -> None:
        print(relayed_line(text, {"child": child.name}), file=sys.stderr, flush=True)


class LiveDisplay(Display):
    """Redraw a table in place; warnings and errors of children scroll above it."""

    def __init__(self, children: Sequence[Child]) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(starting=True)
        self._children = children
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(self._table(), console=self._console, auto_refresh=False, redirect_stdout=False)
        self._live.start()

    def _show(self, child: Child) -> None:
        self.tick()

    def _print(self, child: Child, text: str) -> None:
        self._console.print(relayed_text(text, child.name), markup=False)

    def tick(self) -> None:
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen, followed by the last lines of a failed child."""
        self.tick()
        self._live.stop()
        for child in self._children:
            if child.process.poll() not in (None, 0, EXIT_REFUSED):  # up repeats the one line of a refusal
                for line in filterfalse(child.has_reported, child.last_lines):
                    self._console.print(relayed_text(line, child.name), markup=False)

    def _table(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for width in (10, 8, 16):
            table.add_column(min_width=width)
        for child in self._children:
            bar = ProgressBar(total=1.0, completed=child.fraction, width=24) if child.fraction >= 0 else ""
            style = {"ready": "green", "failed": "red", "ended": "red"}.get(child.state, "yellow")
            text = f"[{style}]{child.state}[/]"
            seconds = "" if child.state == "ready" else f"{time.monotonic() - child.started:.0f} s"
            table.add_row(child.name, text, child.address, child.stage, bar, seconds)
        return table
