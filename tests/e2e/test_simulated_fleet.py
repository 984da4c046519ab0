"""Simulated fleets: only the model and its KV are simulated, and tokens do not depend on the path of a request."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import recording_connector
from fleet import MODEL_NAME, Fleet, NodeProcess, start_fleet
from machine import patience
from stepper import Stepper

import runner
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import node_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve

SIMULATED = ["--engine", "simulated"]
SLOW_PROMPTS = ["--sim-costs", "prompt-token=0.004", "--max-batch-tokens", "256"]  # a step takes one second


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory / name)
    return directory


@pytest.fixture
def fleet(model: Path) -> Iterator[Fleet]:
    with start_fleet(model, prefill_flags=[*SIMULATED, *SLOW_PROMPTS], decode_flags=SIMULATED) as fleet:
        yield fleet


def new_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=length)


def expected(model: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens of the simulated runner alone. They depend on the files of the checkpoint."""
    options = NodeOptions(model=str(model), engine="simulated", sim_speed=float("inf"))
    model_runner = runner.build(resolve(options, node_devices(options, 1)[0], {}), lambda stage, fraction: None)
    (running,) = Stepper(model_runner).generate([prompt], num_tokens)
    return running.output


def streamed(fleet: Fleet, prompt: list[int], num_tokens: int) -> list[int]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    tokens: list[int] = []
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body | {"return_token_ids": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or []
    return tokens


def uses_a_device(node: NodeProcess) -> bool:
    """Return whether a process of the node has loaded torch, NIXL or UCX."""
    return any(name in m.path for p in node.processes() for m in p.memory_maps() for name in ("torch", "nixl", "libuc"))


def test_tokens_are_equal_with_and_without_handoff_and_after_prefill_death(fleet: Fleet, model: Path) -> None:
    (prefill,) = fleet.prefill
    (decode,) = fleet.decode
    assert [node.describe().runner for node in (prefill, decode)] == ["simulated", "simulated"]
    assert not uses_a_device(prefill)
    assert not uses_a_device(decode)

    handed_off, local, disturbed, alone = (new_prompt(length, length) for length in (100, 20, 1000, 101))
    assert streamed(fleet, handed_off, 12) == expected(model, handed_off, 12)
    assert decode.counter("handoffs") == 1
    assert decode.counter("kv_read_bytes") > 0
    assert streamed(fleet, local, 12) == expected(model, local, 12)
    assert decode.counter("handoffs") == 1

    with ThreadPoolExecutor() as threads:
        answer = threads.submit(streamed, fleet, disturbed, 12)
        fleet.wait_until(lambda: decode.counter("kv_reads") > 1, 10.0)  # D has read the first part
        prefill.kill()
        assert answer.result(patience(30.0)) == expected(model, disturbed, 12)
    assert decode.counter("handoff_recomputes") == 1
    assert streamed(fleet, alone, 12) == expected(model, alone, 12)
    decode.wait_idle()


def test_kv_moves_through_a_connector_of_the_operator(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv(recording_connector.FILE, str(calls))
    monkeypatch.setenv("PYTHONPATH", str(Path(recording_connector.__file__).parent), prepend=os.pathsep)
    flags = [*SIMULATED, "--kv-connector", "recording_connector:RecordingConnector"]
    prompt = new_prompt(100, 7)
    with start_fleet(model, prefill_flags=flags, decode_flags=flags) as fleet:
        assert streamed(fleet, prompt, 5) == expected(model, prompt, 5)
        assert fleet.decode[0].counter("kv_reads") >= 1
    assert {"register", "connect", "read"} == set(calls.read_text().split())


@pytest.mark.slow
def test_thirty_simulated_nodes_serve_together(model: Path) -> None:
    prompts = [new_prompt(100, seed) for seed in range(60)]
    with start_fleet(model, 15, 15, prefill_flags=SIMULATED, decode_flags=SIMULATED) as fleet:
        with ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda prompt: streamed(fleet, prompt, 20), prompts))
        assert answers == [expected(model, prompt, 20) for prompt in prompts]
        assert sum(node.counter("handoffs") for node in fleet.decode) == len(prompts)
        for node in [*fleet.prefill, *fleet.decode]:
            node.wait_idle()
