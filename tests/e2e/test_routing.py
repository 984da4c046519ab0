"""Routers choose nodes by the nodes' reports: simulated nodes, real reports, real HTTP."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Iterator

import pytest
from fleet import MODEL_NAME, Fleet, start_fleet
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL

SIMULATED = ("--engine", "simulated")
PREFIX_AWARE = ("--policy", "prefix-aware")
COSTS = ("--sim-costs", "prompt-token=0.0002")  # so that a cached prefix matters with few tokens


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    flags = [*SIMULATED, *COSTS]
    with start_fleet(EMBEDDED_MODEL, 2, 1, prefill_flags=flags, decode_flags=flags, router_flags=PREFIX_AWARE) as fleet:
        yield fleet


def metric(url: str, name: str) -> float:
    """Return the sum of a metric over all labels."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def complete(url: str, prompt: list[int]) -> int:
    """Serve a prompt and return the number of its cached tokens."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=patience(30)) as response:
        return int(json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_every_router_sends_a_prompt_to_the_node_with_its_prefix(fleet: Fleet) -> None:
    prefix = random.Random(1).choices(range(3, 4096), k=800)
    other = random.Random(2).choices(range(3, 4096), k=800)
    assert complete(fleet.url, prefix) == 0
    assert complete(fleet.url, other) == 0

    fleet.start_router(EMBEDDED_MODEL, PREFIX_AWARE)  # a second router, which has routed no request
    fleet.wait_ready()
    assert complete(fleet.url, [*other, 5]) == 800
    assert complete(fleet.url, [*prefix, 6]) == 800
    assert metric(fleet.url, "pdserve_expected_cached_prompt_tokens_total") == 1600
    assert metric(fleet.url, "pdserve_cached_prompt_tokens_total") == 1600


def test_lost_node_gets_no_requests(fleet: Fleet) -> None:
    prompt = random.Random(3).choices(range(3, 4096), k=400)
    fleet.prefill[1].kill()
    fleet.wait_until(lambda: metric(fleet.url, "pdserve_nodes_ready") == 2, 10.0)
    for seed in range(4):
        complete(fleet.url, [*prompt, seed + 3])
    assert fleet.decode[0].counter("handoff_failures") == 0
