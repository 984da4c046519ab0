"""``pdserve doctor`` as a process: its findings on this machine, and for wrong flags, files and peers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from machine import patience

from cli.doctor.checks import check_bytecode, check_requirement, check_ucx_ports
from cli.doctor.findings import Finding, Level
from pdserve.checkpoint.hub import EMBEDDED_MODEL

Findings = dict[str, Finding]


def doctor(*flags: str, model: str = str(EMBEDDED_MODEL), **environ: str) -> tuple[int, Findings]:
    """Return its exit status, and its findings by check."""
    command = [sys.executable, "-m", "cli", "doctor", model, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=patience(60))
    findings = msgspec.convert(json.loads(done.stdout), list[Finding])
    assert all(finding.remedy or finding.level is not Level.WARN for finding in findings), "a warning without a remedy"
    by_check = {finding.check: finding for finding in findings}
    assert len(by_check) == len(findings)
    return done.returncode, by_check


def failed(findings: Findings) -> set[str]:
    return {check for check, finding in findings.items() if finding.level is Level.FAIL}


def warned(findings: Findings) -> set[str]:
    return {check for check, finding in findings.items() if finding.level in (Level.WARN, Level.FAIL)}


@pytest.mark.slow
def test_no_check_fails_on_this_machine() -> None:
    status, findings = doctor("--device", "cpu", "--require-transport", "shm", UCX_TCP_PORT_RANGE="20000-20255")
    assert (status, failed(findings)) == (0, set()), findings
    assert "shm" in findings["transport"].text
    checks = (
        "clock tls port device checkpoint variables bytecode runner tokenizer tensors memory shm memlock nixl transport"
    )
    assert findings.keys() == {*checks.split(), "ucx ports"}


@pytest.mark.parametrize(("forbidden", "level"), [(False, Level.OK), (True, Level.NOTE)])
def test_bytecode_is_written_once_or_missed_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbidden: bool, level: Level
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    assert check_bytecode().level is level


@pytest.mark.parametrize("command", ["prefill", "up"])
def test_start_says_that_it_compiles_everything(command: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "empty")}
    argv = [sys.executable, "-m", "cli", command, "/no/such/model", "--port", "0"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=patience(60))
    warning, *_, error = done.stderr.splitlines()
    assert "PyTorch has no bytecode" in warning
    assert "python -m compileall" in warning
    assert "/no/such/model" in error


@pytest.mark.slow
def test_a_machine_by_itself_has_no_warnings() -> None:
    """UCX's warning has its place in the table."""
    status, findings = doctor("--device", "cpu", UCX_NET_DEVICES="lo", UCX_NO_SUCH_SETTING="1", UCX_TLS="tcp,shm")
    assert (status, warned(findings)) == (0, {"nixl"}), findings
    assert "UCX_NO_SUCH_SETTING" in findings["nixl"].text
    assert findings["tls"].level is Level.NOTE
    status, findings = doctor("--engine", "simulated", "--host", "0.0.0.0")
    assert (status, warned(findings)) == (0, {"tls"}), findings


def hub_cache(directory: Path, *files: str) -> dict[str, str]:
    """Put files of the embedded model into a cache of the hub as org/name; return its variables."""
    snapshot = directory / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (directory / "models--org--name" / "refs").mkdir()
    (directory / "models--org--name" / "refs" / "main").write_text("0" * 40)
    for file in files:
        (snapshot / file).symlink_to(EMBEDDED_MODEL / file)
    return {"HF_HUB_CACHE": str(directory), "HF_HUB_OFFLINE": "1"}


def test_the_tokens_that_end_answers_are_told_and_a_disagreement_is_a_warning(tmp_path: Path) -> None:
    status, findings = doctor("--engine", "simulated")
    assert "answers end with <|im_end|> (2), <|endoftext|> (0)" in findings["tokenizer"].text
    for path in EMBEDDED_MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    status, findings = doctor("--engine", "simulated", model=str(tmp_path))
    assert (status, warned(findings)) == (0, {"tokenizer"})
    assert findings["tokenizer"].text.endswith("<|endoftext|> (0), <|im_end|> (2); only the tokenizer names 2")


@pytest.mark.slow
def test_hub_ids_are_looked_up(tmp_path: Path) -> None:
    small = [path.name for path in EMBEDDED_MODEL.iterdir() if path.suffix in (".json", ".jinja")]
    missing = hub_cache(tmp_path / "empty")
    partial = hub_cache(tmp_path / "partial", *small)
    whole = hub_cache(tmp_path / "whole", *small, "model.safetensors")
    status, findings = doctor("--device", "cpu", "--kv-connector", "none", model="no/model", **missing)
    assert (status, failed(findings)) == (1, {"checkpoint"})
    assert "its download from the hub failed" in findings["checkpoint"].text
    status, findings = doctor("--device", "cpu", "--kv-connector", "none", model="org/name", **partial)
    assert (status, warned(findings)) == (0, {"checkpoint"})
    assert findings.keys() >= {"runner", "tokenizer", "memory"}
    status, findings = doctor("--device", "cpu", "--kv-connector", "none", model="org/name", **whole)
    assert (status, warned(findings)) == (0, set())
    assert findings["tensors"].level is Level.OK


@pytest.mark.slow
def test_a_wrong_runner_and_a_misspelled_variable_have_a_line_each() -> None:
    variables = {"PDSERVE_USE_V2_MODEL_RUNNER": "V1", "PDSERVE_MAX_NUM_SEQ": "4"}
    status, findings = doctor("--device", "cpu", **variables)
    assert (status, failed(findings)) == (1, {"runner"}), findings
    assert "PDSERVE_USE_V2_MODEL_RUNNER='V1' is not allowed; set it to 0 (V1) or 1 (V2)" in findings["runner"].text
    assert findings["variables"].level is Level.WARN
    assert "PDSERVE_MAX_NUM_SEQ is set" in findings["variables"].text
    assert "did you mean PDSERVE_MAX_NUM_SEQS?" in findings["variables"].text


@pytest.mark.slow
def test_doctor_ends_although_nixl_does_not() -> None:
    """With no time for it, the check has always failed before NIXL is loaded."""
    program = "from cli.doctor import command; command._NIXL_SECONDS = 0.0; command.main([MODEL, '--device', 'cpu'])"
    program = program.replace("MODEL", repr(str(EMBEDDED_MODEL)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60.0))
    assert done.returncode == 1
    assert "two agents have not connected within 0 s" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict: it would not start, nixl failed"


@pytest.mark.slow
def test_a_silent_fallback_to_tcp_fails() -> None:
    status, findings = doctor("--device", "cpu", "--require-transport", "shm", UCX_TLS="tcp")
    assert (status, failed(findings)) == (1, {"transport"})
    assert "falls back to tcp" in findings["transport"].text


def test_all_failing_checks_are_reported_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        port = taken.getsockname()[1]
        peer = closed.getsockname()[1]
        closed.close()
        flags = ("--device", "cpu", "--port", str(port), "--grpc-tls", str(tmp_path), "--prefill", f"127.0.0.1:{peer}")
        status, findings = doctor(*flags, model=str(tmp_path))
    assert (status, failed(findings)) == (1, {"port", "tls", "checkpoint", "peer"})
    assert str(port) in findings["port"].text
    assert "ca.pem" in findings["tls"].text


@contextmanager
def prefill_node() -> Iterator[str]:
    """Run a simulated prefill node; yield its address once it is ready."""
    status, write = os.pipe()
    flags = ["--engine", "simulated", "--status-fd", str(write)]
    command = [sys.executable, "-m", "prefill_node", str(EMBEDDED_MODEL), *flags]
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL) as process, os.fdopen(status) as lines:
        os.close(write)
        try:
            states: list[dict[str, str]] = []
            while not states or states[-1]["state"] != "ready":
                states.append(json.loads(lines.readline()))
            yield states[0]["address"]
        finally:
            process.terminate()


@pytest.mark.slow
def test_peers_are_checked_for_compatibility(tmp_path: Path) -> None:
    with prefill_node() as address:
        (listed := tmp_path / "listed").write_text(address)
        status, findings = doctor("--engine", "simulated", "--prefill", f"file://{listed}")
        assert (status, findings["peers"].level, findings["peer"].level) == (0, Level.OK, Level.OK)
        status, findings = doctor("--engine", "simulated", "--prefill", address)
        assert (status, findings["peer"].level) == (0, Level.OK)
        assert not findings.keys() & {"nixl", "transport", "memlock"}
        status, findings = doctor("--engine", "simulated", "--block-size", "32", "--prefill", address)
        assert (status, failed(findings)) == (1, {"peer"})


@pytest.mark.parametrize(
    ("required", "kind", "level"),
    [
        ("", "tcp", Level.WARN),
        ("", "shm", Level.OK),
        ("rdma", "rdma", Level.OK),
        ("rdma", "nvlink", Level.OK),
        ("rdma", "tcp", Level.FAIL),
    ],
)
def test_a_required_transport_accepts_itself_and_faster_ones(required: str, kind: str, level: Level) -> None:
    assert check_requirement(required, kind, "lanes").level is level


@pytest.mark.parametrize("text", ["20000", "9-3", "0-5", "70000-70001", "a-b"])
def test_an_invalid_ucx_port_range_fails(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", text)
    finding = check_ucx_ports(1, "127.0.0.1")
    assert finding.level is Level.FAIL
    assert text in finding.text
