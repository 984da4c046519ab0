"""The output of ``pdserve up`` while its children start: a live table on a terminal, plain or JSON lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.launcher.supervisor import Child
from pdserve.logs import chosen_format, json_line, relayed_line
from pdserve.process import EXIT_REFUSED

if TYPE_CHECKING:
    from rich.table import Table

_ROUTINE = re.compile(r"\b(INFO|DEBUG) ")  # log lines that the live table leaves out


def make_display(children: Sequence[Child], live: bool) -> StartupDisplay:
    """Choose the display for stderr and the log format. ``children`` may grow later; ``live`` allows a table."""
    if chosen_format() == "json":
        return JsonDisplay()
    return LiveDisplay(children) if live and sys.stderr.isatty() else StartupDisplay()


class StartupDisplay:
    """Print one line per loading stage and per ready child, and relay all output."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def changed(self, child: Child) -> None:
        text = child.stage if child.state == "loading" else child.state
        if child.state == "ready":
            text = f"ready after {time.monotonic() - child.started:.1f} s on {child.address}"
        if child.state in ("loading", "ready") and self._shown.get(child.name) != text:
            self._shown[child.name] = text
            self.printed(child, text)

    def printed(self, child: Child, text: str) -> None:
        print(f"{child.name}: {text}", file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Called periodically."""

    def close(self) -> None:
        """Called once all children are ready or one has failed."""


class JsonDisplay(StartupDisplay):
    """Relay the children's log lines as JSON lines of one log."""

    def changed(self, child: Child) -> None:
        if child.state == "ready":
            line = json_line("INFO", "up", f"{child.name} is ready", None, {"child": child.name})
            print(line, file=sys.stderr, flush=True)

    def printed(self, child: Child, text: str) -> None:
        print(relayed_line(text, {"child": child.name}), file=sys.stderr, flush=True)


class LiveDisplay(StartupDisplay):
    """Redraw a table in place; warnings and errors of children scroll above it."""

    def __init__(self, children: Sequence[Child]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._children = children
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(self._table(), console=self._console, auto_refresh=False, redirect_stdout=False)
        self._live.start()

    def changed(self, child: Child) -> None:
        self.tick()

    def printed(self, child: Child, text: str) -> None:
        if not _ROUTINE.search(text):
            self._console.print(f"{child.name}: {text}", markup=False)

    def tick(self) -> None:
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen, followed by the last lines of a failed child."""
        self.tick()
        self._live.stop()
        for child in self._children:
            if child.process.poll() not in (None, 0, EXIT_REFUSED):  # up repeats the one line of a refusal
                for line in child.last_lines:
                    self._console.print(f"{child.name}: {line}", markup=False)

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
