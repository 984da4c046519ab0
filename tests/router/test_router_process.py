"""The router process: start, failed start, draining and exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from machine import patience
from router_process import RouterProcess, router_process, wait_for
from scripted_node import Conversation, Script, ScriptedNode

from cli.main import main
from pdserve.errors import ConfigError
from router.options import parse_options

PROBE = [sys.executable, "-m", "cli", "probe"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router", *flags], capture_output=True, text=True, timeout=patience(20)
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "required"),
        (["m", "--model", "n"], "not allowed"),
        (["m", "--decode", "nohost"], "host:port"),
        (["m", "--prefill", "dns://name"], "dns://name:port"),
        (["m", "--prefill", "k8s://name:80"], "k8s://namespace/service:port"),
        (["--model", "a=m", "--model", "a=n"], "the name 'a' is given twice"),
        (["--model", "=m"], "incomplete"),
        (["--model", "a=m", "--served-model-name", "b"], "single MODEL"),
        (["m", "--port", "99999"], "65535"),
        (["m", "--max-inflight", "0"], "at least 1"),
        (["m", "--request-timeout", "-1"], "above 0"),
        (["m", "--decoed", "x:1"], "did you mean --decode"),
    ],
)
def test_invalid_flags_are_explained(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_options(flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["m", "--port", "none"], "'none' is not a port"),
        (["/nowhere/at/all", "--port", "0"], "/nowhere/at/all"),
        (["m", "--host", "203.0.113.7", "--port", "1"], "203.0.113.7"),
    ],
)
def test_failed_start_prints_one_line(flags: list[str], said: str) -> None:
    ended = run(*flags)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_port_in_use_prints_one_line(tokenizer_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(str(tokenizer_dir), "--port", str(port))
    assert ended.returncode == 2
    assert f"port {port}" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_flags_become_options() -> None:
    options = parse_options(["--model", "m", "--prefill", "a:1", "--prefill", "b:2", "--decode", "c:3", "--port", "0"])
    assert (options.models, options.prefill, options.decode) == ((("m", "m"),), ("a:1", "b:2"), ("c:3",))
    assert options.port == 0
    assert parse_options(["m", "--served-model-name", "n"]).models == (("n", "m"),)
    assert parse_options(["--model", "a=m", "--model", "hub/n"]).models == (("a", "m"), ("hub/n", "hub/n"))


def test_tools_of_nodes_name_a_router(
    tokenizer_dir: Path, scripted_node: ScriptedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    with router_process(tokenizer_dir, ("--decode", scripted_node.address)) as router:
        assert main(["weights", "show", router.address]) == 1
    error = capsys.readouterr().err
    assert f"{router.address} is no node: it speaks HTTP/1.1, as routers do; give the addresses of nodes" in error


def test_states_are_reported_in_order(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    with router_process(tokenizer_dir, ["--decode", scripted_node.address]) as process:
        states = [state["state"] for state in process.states]
        assert states[0] == "listening"
        assert states[-1] == "ready"
        assert set(states[1:-1]) == {"loading"}


def test_router_without_nodes_is_unhealthy_and_says_why(tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        router_process(tokenizer_dir, ["--decode", "127.0.0.1:9"], until="loading") as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
    ):
        response = client.get("/health")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert client.get("/v1/models").status_code == 200
        response = client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        probes = [subprocess.run([*PROBE, process.address, *service]).returncode for service in ([], ["live"])]
        assert probes == [1, 0]
        said = ""
        while "decode node at 127.0.0.1:9 does not answer" not in (said := said + capfd.readouterr().err):
            assert process.process.poll() is None, said
            time.sleep(0.05)
        assert f"listening on {process.url}" in said


@pytest.mark.slow
def test_request_on_idle_connection_survives_a_stalled_router(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    with (
        router_process(tokenizer_dir, ["--decode", scripted_node.address]) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
    ):
        assert client.get("/health").status_code == 200
        process.process.send_signal(signal.SIGSTOP)
        threading.Timer(7.0, process.process.send_signal, [signal.SIGCONT]).start()
        assert client.get("/health").status_code == 200


@contextmanager
def streaming(process: RouterProcess, node: ScriptedNode, script: Script) -> Iterator[Iterator[str]]:
    """The events of a request after its first token, which ``script`` sends."""
    node.scripts["signal"] = script
    body = {"prompt": [1], "cache_salt": "signal", "stream": True}
    with httpx.stream(
        "POST", f"{process.url}/v1/completions", json=body, trust_env=False, timeout=patience(20)
    ) as response:
        lines = filter(None, response.iter_lines())
        assert next(lines).startswith("data: {")
        yield lines


def health(process: RouterProcess) -> int:
    """The status of /health; 0 if the connection is refused."""
    try:
        return httpx.get(f"{process.url}/health", trust_env=False).status_code
    except httpx.TransportError:
        return 0


async def endless(conversation: Conversation) -> None:
    conversation.token(65)
    await conversation.cancelled.wait()


@pytest.mark.parametrize(
    ("flags", "signals"),
    [
        ((), (signal.SIGINT,)),
        ((), (signal.SIGTERM, signal.SIGTERM)),
        (("--drain-grace", "60"), (signal.SIGTERM, signal.SIGINT)),
        (("--drain-timeout", "0.2"), (signal.SIGTERM,)),
    ],
    ids=["ctrl-c", "twice", "twice in the grace", "limit"],
)
def test_request_beyond_the_drain_timeout_gets_an_error(
    tokenizer_dir: Path, scripted_node: ScriptedNode, flags: tuple[str, ...], signals: tuple[signal.Signals, ...]
) -> None:
    with (
        router_process(tokenizer_dir, ["--decode", scripted_node.address, *flags]) as process,
        streaming(process, scripted_node, endless) as lines,
    ):
        for number in signals:
            process.process.send_signal(number)
            wait_for(lambda: health(process) != 200)  # equal pending signals would merge into one
        rest = list(lines)
        assert "shutting down" in rest[-1]
        assert "[DONE]" not in "".join(rest)
        assert process.process.wait(timeout=patience(10)) == 0
    scripted_node.wait_cancelled("signal")


def test_sigterm_drains_streams_and_rejects_new_requests(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    """During the grace period the router accepts requests, because load balancers notice late."""
    go_on = asyncio.Event()

    async def until_told(conversation: Conversation) -> None:
        conversation.token(65)
        await go_on.wait()
        conversation.token(66, finish="length")

    async def short(conversation: Conversation) -> None:
        conversation.token(65, finish="length")

    scripted_node.scripts["short"] = short
    flags = ["--decode", scripted_node.address, "--drain-grace", "1.5"]
    with (
        router_process(tokenizer_dir, flags) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
        streaming(process, scripted_node, until_told) as lines,
    ):
        assert health(process) == 200
        process.process.send_signal(signal.SIGTERM)
        wait_for(lambda: health(process) == 503)
        answer = client.post("/v1/completions", json={"prompt": [1], "cache_salt": "short"})
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        wait_for(lambda: health(process) == 0)
        scripted_node.do(go_on.set)
        assert list(lines)[-1] == "data: [DONE]"
        assert process.process.wait(timeout=patience(10)) == 0


def test_closed_lifeline_ends_the_process(tokenizer_dir: Path) -> None:
    with router_process(tokenizer_dir, [], until="listening") as process:
        pid = process.process.pid
    assert process.process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_router_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, router.__main__, router.server; "
        "print([m for m in ('torch', 'transformers', 'engine', 'runner', 'connector') if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert ended.stdout.strip() == "[]"
