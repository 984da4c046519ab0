"""The loop of ``pdserve top``: fetch a report, render it, wait a second or for a key."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence

import httpx
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cli.router_url import add_router_url, base_url, connection_errors, key_headers, wants_key
from cli.top.screen import screen
from pdserve.errors import ConfigError, NodeError
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.process import run_command
from router.dashboard.live import STATE_PATH, LiveHistory, LiveReport

_PERIOD = 1.0  # seconds
_TIMEOUT = 4.0  # seconds per request
_HISTORY = 300  # seconds
_RATES_AFTER = 1.5  # seconds until the router has polled its nodes twice


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: top(make_parser().parse_args(argv)))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve top", "Watch a router and its nodes in a terminal.")
    add_router_url(parser)
    parser.add_argument("--once", action="store_true", help="print once as plain text (default when piped)")
    return parser


def top(args: argparse.Namespace) -> int:
    """Show the dashboard until the user quits. Raises ConfigError or NodeError if the router sends no report."""
    router = _RouterState(args.url, key_headers(args))
    if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        asyncio.run(_print_once(router))
    else:
        asyncio.run(_show_live(router))
    return 0


class _RouterState:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.url = base_url(url)
        self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT)
        self.report: LiveReport | None = None
        self.error = ""  # reason why the report is outdated

    async def fetch(self) -> LiveReport:
        """Fetch a report and join its history with the earlier one. Raises ConfigError or NodeError."""
        last = self.report
        seen = {"epoch": last.epoch, "second": str(last.history.seconds[-1])} if last else {}
        with connection_errors(self.url):
            response = await self._client.get(self.url + STATE_PATH, params=seen)
        report = _decode(response, self.url)
        if last is not None and last.epoch == report.epoch:
            report = msgspec.structs.replace(report, history=_joined(last.history, report.history))
        self.report = report
        return report


def _decode(response: httpx.Response, url: str) -> LiveReport:
    match response.status_code:
        case 401:
            raise wants_key(url)
        case 404:
            raise ConfigError(f"{url} has no dashboard: it is not a router, or was started with --no-dashboard")
        case status if status != 200:
            raise NodeError(f"{url} answered with status {status}; see its log")
    try:
        return msgspec.json.decode(response.content, type=LiveReport)
    except msgspec.DecodeError as exc:
        raise NodeError(f"{url} sent an unknown format: {exc}; use the same version as the router") from exc


def _joined(earlier: LiveHistory, later: LiveHistory) -> LiveHistory:
    names = LiveHistory.__struct_fields__
    return LiveHistory(**{name: (getattr(earlier, name) + getattr(later, name))[-_HISTORY:] for name in names})


async def _print_once(router: _RouterState) -> None:
    """Print plain text as wide as the terminal, COLUMNS or 80."""
    await router.fetch()
    await asyncio.sleep(_RATES_AFTER)
    report = await router.fetch()
    console = Console(highlight=False)
    console.print(screen(report, router.url, console.width))


async def _show_live(router: _RouterState) -> None:
    """Refresh the screen until q, Ctrl-C or SIGTERM."""
    changed = asyncio.Event()
    ended = False

    def end() -> None:
        nonlocal ended
        ended = True
        changed.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    await router.fetch()  # a first failure ends the command
    console = Console(highlight=False)
    with _on_keys("qQ\x03\x04", end), Live(console=console, screen=True, auto_refresh=False) as live:
        refresher = asyncio.create_task(_refresh(router, changed.set))
        while not ended:
            changed.clear()
            live.update(_full_screen(router, console), refresh=True)
            await changed.wait()
        refresher.cancel()


async def _refresh(router: _RouterState, changed: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_PERIOD)
        try:
            await router.fetch()
            router.error = ""
        except (NodeError, ConfigError) as exc:
            router.error = str(exc)
        changed()


def _full_screen(router: _RouterState, console: Console) -> Group:
    assert router.report is not None
    footer = Text(router.error, "bold red") if router.error else Text("q quits", "dim")
    footer.no_wrap = True
    footer.overflow = "ellipsis"
    return Group(screen(router.report, router.url, console.width, console.height - 2), Text(), footer)


@contextlib.contextmanager
def _on_keys(keys: str, callback: Callable[[], None]) -> Iterator[None]:
    """Read keys unbuffered and without echo; call ``callback`` on any of ``keys`` and at the end of input."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        pressed = os.read(descriptor, 64).decode(errors="replace")
        if not pressed or any(key in keys for key in pressed):
            callback()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, on_readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
