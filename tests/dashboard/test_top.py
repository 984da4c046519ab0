"""``pdserve top`` on a real terminal, in a pipe, and without a router."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
from fleet import MODEL_NAME, Fleet
from http_stub import http_stub
from machine import patience
from terminal import HOME, PATIENCE, environ, terminal
from watched_fleet import Streams

from cli.main import main
from router.dashboard.live import STATE_PATH


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "cli", "top", *argv]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*argv), capture_output=True, text=True, timeout=patience(PATIENCE), env=environ())


def test_top_updates_live_and_restores_the_terminal(fleet: Fleet, streams: Streams) -> None:
    with terminal(command(fleet.url)) as screen, streams(2):
        screen.read_until("requests 2 running")
        screen.read_until("d-one")
        assert "3 of 3 nodes ready" in screen.frame[0]
        assert max(map(len, screen.frame)) <= 80
        assert "\x1b[2J" not in screen.said.split(HOME, 2)[-1]  # a node has it in its name
        screen.resize(60, 20)
        screen.process.send_signal(signal.SIGWINCH)  # as the terminal itself does
        screen.read_until(lambda frame: 0 < max(map(len, frame)) <= 60)
        assert len(screen.frame) <= 20
        screen.press("q")
        assert screen.wait() == 0
        assert "\x1b[?1049l" in screen.said  # leaves the alternate screen
        assert screen.settings == screen.before


def test_top_waits_for_a_lost_router_and_ends_on_a_signal(fleet: Fleet) -> None:
    report = httpx.get(fleet.url + STATE_PATH, trust_env=False).content
    with ExitStack() as after:
        with http_stub(200, report) as url:
            screen = after.enter_context(terminal(command(url)))
            screen.read_until("q quits")
        screen.read_until("no answer from")
        screen.process.send_signal(signal.SIGINT)
        assert screen.wait() == 0


def test_nodes_show_the_requests_that_they_report(fleet: Fleet) -> None:
    """Requests that a report may not include yet count for policies only: they may have ended already."""
    ends = threading.Event()

    def send(seed: int) -> None:
        body = {"model": MODEL_NAME, "prompt": [seed + 3] * 8, "max_tokens": 1}
        with httpx.Client(trust_env=False, timeout=patience(30)) as client:
            while not ends.is_set():
                client.post(f"{fleet.url}/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)  # more requests have been sent than run at the same time
        reports = [httpx.get(fleet.url + STATE_PATH, trust_env=False).json() for _ in range(20)]
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    shown = [node["running"] for report in reports for node in report["now"]["nodes"]]
    assert max(shown) <= 4


def test_piped_top_prints_once_as_plain_text(fleet: Fleet, streams: Streams) -> None:
    with streams(2):
        ended = run(fleet.url)
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert "requests 2 running" in ended.stdout
    decodes = [line.partition(" ● ")[2].split() for line in ended.stdout.splitlines() if line.startswith("d-")]
    assert [state for state, *_ in decodes] == ["ready", "ready"]
    assert sum(int(running) for _, running, *_ in decodes) == 2
    assert not any("–" in line[:-1] for line in decodes)  # rates are known; the cached share may be unknown


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"{}", "requires a valid API key"),
        (404, b"{}", "has no dashboard"),
        (500, b"{}", "status 500"),
        (200, b"<html>", "use the same version as the router"),
    ],
)
def test_unreachable_router_gives_one_line(
    status: int, body: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with http_stub(status, body) as url:
        assert main(["top", url, "--once"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["ftp://127.0.0.1:9"], "is not the URL of a router"),
        (["--api-key", "\x1b", "http://127.0.0.1:9"], "printable ASCII"),
    ],
)
def test_invalid_arguments_give_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *argv, "--once"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
