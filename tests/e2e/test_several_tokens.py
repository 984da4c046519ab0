"""Simulated nodes that yield several tokens per decode step answer as nodes that yield one, token by token."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from client_load import Load, new_body
from fault_injection import FaultInjector, random_faults
from fleet import Fleet, copy_without_weights, start_fleet
from machine import patience
from test_lost_nodes import migrations

SIMULATED = ("--engine", "simulated")
SEVERAL = (*SIMULATED, "--synthetic-acceptance", "2.5")
HAND_OFF_ALL = ("--handoff-min-tokens", "1")
SLOW_READS = ("--sim-costs", "read=0.2")  # P decodes ahead meanwhile
OUTPUT = 60  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_without_weights(tmp_path_factory.mktemp("model"))


@dataclass
class Expected:
    """Requests, and their answers by nodes that yield one token per step."""

    load: Load
    bodies: list[dict[str, Any]]
    choices: list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    rng = random.Random(3)
    load = Load([new_body(rng, max_prompt=200, max_tokens=100) for _ in range(12)])
    with start_fleet(model, 0, 1, decode_flags=SIMULATED) as fleet:
        bodies = limited_bodies(fleet)
        choices = [choices_of(fleet, body) for body in bodies]
        asyncio.run(load.record_expected(fleet.url, rng))
    return Expected(load, bodies, choices)


def limited_bodies(fleet: Fleet) -> list[dict[str, Any]]:
    """Return requests that end at any place among the tokens of a step."""
    prompt = random.Random(1).choices(range(3, 4096), k=150)
    base = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0.8, "seed": 5, "return_token_ids": True}
    (choice,) = choices_of(fleet, base)
    tokens = choice["token_ids"]
    bodies = [base | {"max_tokens": most} for most in range(1, 13)]
    bodies += [base | {"stop_token_ids": [tokens[at]]} for at in range(20, 32)]
    # The first of these stop ids is sampled too early to end the answer.
    bodies += [base | {"min_tokens": 30, "stop_token_ids": [tokens[10], tokens[at]]} for at in range(29, 35)]
    bodies += [base | {"n": 3}, base | {"n": 3, "stop_token_ids": [tokens[17]]}, base | {"logprobs": 3}]
    bodies += [base | {"allowed_token_ids": [5, 6, 7, 8]}, base | {"bad_words": ["a", "e"]}]
    return bodies


def choices_of(fleet: Fleet, body: dict[str, Any]) -> list[dict[str, Any]]:
    choices = fleet.post("/v1/completions", body)["choices"]
    assert isinstance(choices, list)
    return choices


def check(fleet: Fleet, expected: Expected, seconds: float = 1.0) -> None:
    """Send all requests, several at a time."""
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda body: choices_of(fleet, body), expected.bodies)) == expected.choices
    asyncio.run(expected.load.run(fleet.url, clients=6, seconds=seconds, seed=0))
    assert not expected.load.failures, expected.load.failures[0]


def check_idle(fleet: Fleet) -> None:
    for node in fleet.nodes:
        node.wait_idle(30.0)


@pytest.mark.slow
def test_stop_ids_limits_choices_and_masks_without_a_handoff(model: Path, expected: Expected) -> None:
    with start_fleet(model, 0, 1, decode_flags=SEVERAL) as fleet:
        (decode,) = fleet.decode
        (choice,) = choices_of(fleet, expected.bodies[0] | {"max_tokens": 1000})
        assert choice["token_ids"][:12] == expected.choices[11][0]["token_ids"]
        assert 1000 / 3 < decode.counter("steps") < 1000 / 2
        check(fleet, expected)
        check_idle(fleet)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(SEVERAL, SIMULATED, marks=pytest.mark.slow),  # test_speculation.py has a quick one
        pytest.param(SEVERAL, SEVERAL, marks=pytest.mark.slow),
        pytest.param(SIMULATED, SEVERAL, marks=pytest.mark.slow),
    ],
)
def test_handoffs_with_tokens_that_p_decoded_ahead(
    model: Path, expected: Expected, prefill: Sequence[str], decode: Sequence[str]
) -> None:
    with start_fleet(model, 1, 1, True, prefill, (*decode, *HAND_OFF_ALL, *SLOW_READS)) as fleet:
        check(fleet, expected)
        assert fleet.decode[0].counter("handoff_ahead_tokens") > 0
        check_idle(fleet)


@pytest.mark.slow
def test_requests_migrate_between_nodes_that_die(model: Path, expected: Expected) -> None:
    faults = random_faults(5, {"prefill": 1, "decode": 3}, pause=0.7)
    with start_fleet(model, 1, 3, True, SEVERAL, (*SEVERAL, *HAND_OFF_ALL), ("--migrations", "20")) as fleet:
        with FaultInjector(fleet, faults):
            check(fleet, expected, seconds=4.0)
        assert migrations(fleet) > 0
        check_idle(fleet)


@pytest.mark.slow  # tests/engine/test_scheduler.py has quick tests
def test_too_few_blocks(model: Path, expected: Expected) -> None:
    """Sequences are preempted and computed again."""
    few = ("--kv-cache-memory", "2MiB", "--max-model-len", "400")
    end = time.monotonic() + patience(20)
    with start_fleet(model, 0, 1, decode_flags=(*SEVERAL, *few)) as fleet:
        check(fleet, expected)
        while not fleet.decode[0].counter("preemptions"):  # few requests meet on a busy machine
            assert time.monotonic() < end, "no sequence was preempted"
            check(fleet, expected)
        check_idle(fleet)
