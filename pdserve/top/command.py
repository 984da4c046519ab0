"""The loop of ``pdserve top``: ask, show, wait a second or for a key."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

import httpx
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pdserve.errors import ConfigError, NodeError
from pdserve.live import STATE_PATH, LiveHistory, LiveReport
from pdserve.top.screen import screen

KEY_VARIABLE = "PDSERVE_API_KEY"
_PERIOD = 1.0  # seconds
_PATIENCE = 4.0  # seconds that an answer may take
_KEPT = 300  # seconds of history
_RATES_AFTER = 1.5  # seconds until nodes have been asked twice


def top(args: argparse.Namespace) -> int:
    """0 when it was told to end. Raises ConfigError or NodeError when the router does not tell anything."""
    router = _Router(args.url, args.api_key or os.environ.get(KEY_VARIABLE, ""))
    if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return asyncio.run(_once(router))
    asyncio.run(_live(router))
    return 0


class _Router:
    """What is known of one."""

    def __init__(self, url: str, key: str) -> None:
        self.where = url if "://" in url else f"http://{url}"
        self.where = self.where.rstrip("/").removesuffix("/dashboard")
        if not key.isascii() or not key.isprintable():
            raise ConfigError("the API key holds what is not printable ASCII; check --api-key")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=_PATIENCE)
        self.report: LiveReport | None = None
        self.trouble = ""  # why the report is an old one

    async def ask(self) -> LiveReport:
        """The latest report, with all of the history that is kept. Raises ConfigError or NodeError."""
        known = self.report
        seen = {"life": known.life, "second": str(known.history.seconds[-1])} if known else {}
        try:
            response = await self._client.get(self.where + STATE_PATH, params=seen)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
            raise ConfigError(f"{self.where} is no URL of a router: {exc}; write http://HOST:PORT") from exc
        except httpx.TransportError as exc:
            reason = str(exc) or "it took too long"
            raise NodeError(f"no answer from {self.where}: {reason}; check its address, and that it runs") from exc
        report = _read(response, self.where)
        if known is not None and known.life == report.life:
            report = msgspec.structs.replace(report, history=_joined(known.history, report.history))
        self.report = report
        return report


def _read(response: httpx.Response, where: str) -> LiveReport:
    match response.status_code:
        case 401:
            raise ConfigError(f"{where} wants an API key that it knows; give it by {KEY_VARIABLE} or --api-key")
        case 404:
            raise ConfigError(f"{where} shows no dashboard: it is no router, or was started with --no-dashboard")
        case status if status != 200:
            raise NodeError(f"{where} answered with status {status}; its log says why")
    try:
        return msgspec.json.decode(response.content, type=LiveReport)
    except msgspec.DecodeError as exc:
        raise NodeError(f"{where} tells what this version does not know: {exc}; use the router's version") from exc


def _joined(earlier: LiveHistory, later: LiveHistory) -> LiveHistory:
    columns = {name: (getattr(earlier, name) + getattr(later, name))[-_KEPT:] for name in LiveHistory.__struct_fields__}
    return LiveHistory(**columns)


async def _once(router: _Router) -> int:
    """Plain text, as wide as the terminal, or as COLUMNS says, or 80."""
    await router.ask()
    await asyncio.sleep(_RATES_AFTER)
    report = await router.ask()
    console = Console(highlight=False)
    console.print(screen(report, router.where, console.width))
    return 0


async def _live(router: _Router) -> None:
    """Until q, Ctrl-C or SIGTERM."""
    changed, ended = asyncio.Event(), False

    def end() -> None:
        nonlocal ended
        ended = True
        changed.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    await router.ask()  # what is wrong from the beginning is an error, and no screen
    console = Console(highlight=False)
    with _keys("qQ\x03\x04", end), Live(console=console, screen=True, auto_refresh=False) as live:
        asking = asyncio.create_task(_follow(router, changed.set))
        while not ended:
            changed.clear()
            live.update(_whole(router, console), refresh=True)
            await changed.wait()
        asking.cancel()


async def _follow(router: _Router, changed: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_PERIOD)
        try:
            await router.ask()
            router.trouble = ""
        except (NodeError, ConfigError) as exc:
            router.trouble = str(exc)
        changed()


def _whole(router: _Router, console: Console) -> Group:
    assert router.report is not None
    last = Text(router.trouble, "bold red") if router.trouble else Text("q ends", "dim")
    last.no_wrap, last.overflow = True, "ellipsis"
    return Group(screen(router.report, router.where, console.width, console.height - 2), Text(), last)


@contextlib.contextmanager
def _keys(ends: str, end: Callable[[], None]) -> Iterator[None]:
    """Keys are read as they are pressed, and not shown; each of ``ends`` ends."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(descriptor, 64).decode(errors="replace")
        if not keys or any(key in ends for key in keys):
            end()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
