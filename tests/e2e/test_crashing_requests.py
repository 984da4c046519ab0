"""A request that ends the engine of each node that computes it, amid others, in simulated fleets."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import MODEL_NAME, Fleet, start_fleet
from stepper import Stepper

import runner
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import node_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve

TOKENS = 300  # output tokens of an innocent request: three seconds
FLAGS = ("--engine", "simulated", "--sim-costs", "step=0.01")
CRASH_AT = 40  # output tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory / name)
    return directory


def new_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=length)


def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of the simulated runner alone."""
    options = NodeOptions(model=str(model), engine="simulated", sim_speed=float("inf"))
    model_runner = runner.build(resolve(options, node_devices(options, 1)[0], {}), lambda stage, fraction: None)
    return [running.output for running in Stepper(model_runner).generate(prompts, TOKENS)]


def streamed(url: str, prompt: list[int]) -> tuple[list[int], Any]:
    """Return the tokens of a completion, and the error that ends it."""
    tokens: list[int] = []
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=90) as response:
        for line in response.iter_lines():
            event = json.loads(line.removeprefix("data: ") or "{}") if line.startswith("data: {") else {}
            if "error" in event:
                return tokens, event["error"]
            for choice in event.get("choices", ()):
                tokens += choice.get("token_ids") or []
    return tokens, None


def num_ended(fleet: Fleet) -> int:
    return sum(node.child.state == "ended" for node in (*fleet.prefill, *fleet.decode))


@pytest.fixture
def others() -> list[list[int]]:
    """Prompts of innocent requests."""
    return [new_prompt(20, seed) for seed in range(12)]


def test_a_request_that_crashes_while_it_decodes_ends_two_engines_and_spares_others(
    model: Path, others: list[list[int]]
) -> None:
    """The crashing token comes in the midst of an answer. All requests are running on all nodes by then."""
    poison = new_prompt(20, 100)
    answers = expected(model, [*others, poison])
    *innocent, guilty = answers
    used = {token for tokens in (*others, *innocent) for token in tokens}
    crash_token = next(token for token in guilty[CRASH_AT:] if token not in used and token not in poison)
    flags = (*FLAGS, "--sim-crash-token", str(crash_token))
    with start_fleet(model, 0, 3, decode_flags=flags) as fleet, ThreadPoolExecutor(20) as threads:
        streams = [threads.submit(streamed, fleet.url, prompt) for prompt in others]
        tokens, error = streamed(fleet.url, poison)
        assert tokens == guilty[: len(tokens)]
        assert (error["type"], error["code"]) == ("server_error", "request_crashes_engines")
        assert "the engines of two decode nodes have ended" in error["message"]
        assert [stream.result() for stream in streams] == [(answer, None) for answer in innocent]
        fleet.wait_until(lambda: num_ended(fleet) == 2, 20.0)


@pytest.mark.slow
def test_a_prompt_that_crashes_a_prefill_node_ends_one_decode_node_more(model: Path, others: list[list[int]]) -> None:
    """D does not compute it itself: it would end with all of its requests, and routers would know of one crash only."""
    poison = new_prompt(600, 100)
    innocent = expected(model, others)
    used = {token for tokens in (*others, *innocent) for token in tokens}
    flags = (*FLAGS, "--sim-crash-token", str(next(token for token in poison if token not in used)))
    with start_fleet(model, 1, 3, prefill_flags=flags, decode_flags=flags) as fleet, ThreadPoolExecutor(20) as threads:
        streams = [threads.submit(streamed, fleet.url, prompt) for prompt in others]
        body = {"model": MODEL_NAME, "prompt": poison, "max_tokens": TOKENS}
        response = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "request_crashes_engines"
        assert response.headers["x-should-retry"] == "false"
        assert [stream.result() for stream in streams] == [(answer, None) for answer in innocent]
        fleet.wait_until(lambda: num_ended(fleet) == 2, 20.0)
        assert [node.child.state for node in fleet.prefill] == ["ended"]
