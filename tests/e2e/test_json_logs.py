"""JSON logs: every line of every process is an object, and a request id finds a request in all of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import MODEL_NAME, Process, start_fleet
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.logs import message_of, relayed_line

FLAGS = ("--engine", "simulated", "--log-format", "json", "--log-requests")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SECRET = "xylophone"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory / name)
    return directory


def log_lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.output.splitlines()]


def test_request_id_is_in_the_logs_of_all_processes(model: Path) -> None:
    with start_fleet(model, 1, 1, True, FLAGS, FLAGS, FLAGS[2:]) as fleet:
        body = {"model": MODEL_NAME, "prompt": SECRET * 60, "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body)
        request_id = answer.headers["x-request-id"]
        assert fleet.router is not None
        processes = {"router": fleet.router, "decode": fleet.decode[0], "prefill": fleet.prefill[0]}

        def lines_with_id(process: Process) -> list[dict[str, Any]]:
            return [line for line in log_lines(process) if line.get("request_id") == request_id]

        fleet.wait_until(lambda: all(lines_with_id(process) for process in processes.values()), 10.0)
        for role, process in processes.items():
            for line in log_lines(process):
                assert line["role"] == role
                assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])
                assert line["level"] in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
                assert line["message"]
                assert line["logger"]
            assert SECRET not in process.output
        first_lines = {role: lines_with_id(process)[0] for role, process in processes.items()}

    usage = answer.json()["usage"]
    router = first_lines["router"]
    decode = first_lines["decode"]
    prefill = first_lines["prefill"]
    assert router["node"]
    assert decode["node"] == fleet.decode[0].address
    assert (router["status"], router["outcome"], router["model"]) == (200, "ok", MODEL_NAME)
    assert router["prompt_tokens"] == prefill["prompt_tokens"] == usage["prompt_tokens"]
    assert router["output_tokens"] == 3
    assert 0 < router["ttft_seconds"] <= router["seconds"]
    assert decode["outcome"] == "done"
    assert decode["reserve_seconds"] + decode["queue_seconds"] + decode["prefill_seconds"] < router["ttft_seconds"]
    assert prefill["prefill_seconds"] < decode["prefill_seconds"]


@pytest.mark.slow
def test_up_merges_the_json_logs_of_its_processes(tmp_path: Path) -> None:
    """Lines that its processes write while they drain are in the log, too."""
    command = [sys.executable, "-m", "cli", "up", str(EMBEDDED_MODEL), "--port", "0", "--device", "cpu", *FLAGS]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as up,
    ):
        assert up.stdout is not None
        welcome = json.loads(up.stdout.readline())
        url = welcome["url"]
        assert [(node["name"], node["device"]) for node in welcome["nodes"]] == [
            ("prefill", "simulated"),
            ("decode", "simulated"),
        ]
        body = {"model": EMBEDDED_MODEL.name, "prompt": SECRET * 60, "max_tokens": 3}
        request_id = httpx.post(f"{url}/v1/completions", json=body).headers["x-request-id"]
        up.terminate()
        assert up.stdout.read() == ""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    children = {line["role"]: line["child"] for line in lines if line.get("request_id") == request_id}
    assert children["router"] == "router"
    assert children["decode"] == "decode"
    assert {"prefill", "decode", "router"} <= {line.get("child") for line in lines}
    assert all(line["role"] in ("router", "decode", "prefill", "up") for line in lines)
    assert any("draining" in line["message"] and line.get("child") == "decode" for line in lines)


def test_failed_start_is_logged_as_json(tmp_path: Path) -> None:
    """With PDSERVE_TRACEBACK=1, the traceback is a field of the line."""
    command = [sys.executable, "-m", "prefill_node", str(tmp_path / "nowhere"), "--log-format", "json"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={"PDSERVE_TRACEBACK": "1"}, timeout=patience(60)
    )
    (line,) = (json.loads(line) for line in ended.stderr.splitlines())
    assert line["level"] == "CRITICAL"
    assert "nowhere" in line["message"]
    assert "Traceback" in line["stack"]


def test_plain_output_of_a_child_becomes_a_json_line() -> None:
    assert json.loads(relayed_line("Fatal: \t{disk}", {"process": "engine"}))["message"] == "Fatal: \t{disk}"
    assert json.loads(relayed_line('{"no": "log"}', {}))["message"] == '{"no": "log"}'
    logged = json.loads(
        relayed_line('{"time":"t","message":"m","process":"rank 1"}', {"process": "engine", "node": "d"})
    )
    assert logged == {"time": "t", "message": "m", "process": "rank 1", "node": "d"}
    assert message_of('{"time":"t","message":"out of memory"}') == "out of memory"
    assert message_of(" {plain} ") == "{plain}"
