"""Large answers of a router in front of simulated nodes: in pieces, within bounded memory, up to documented limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Fleet, start_fleet
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL

NODE = ("--engine", "simulated", "--sim-speed", "inf")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with start_fleet(EMBEDDED_MODEL, prefill=0, decode_flags=NODE) as fleet:
        fleet.wait_until(fleet.serves, 10.0)
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.url, timeout=patience(120.0), trust_env=False) as client:
        yield client


def prompts(num_prompts: int, **fields: Any) -> dict[str, Any]:
    ids = [[300 + index] * 2000 for index in range(num_prompts)]
    return {"prompt": ids, "max_tokens": 1, "ignore_eos": True, "temperature": 0, **fields}


def peak_memory(fleet: Fleet) -> float:
    """Return the highest resident memory of the router so far, in MiB."""
    assert fleet.router is not None
    lines = Path(f"/proc/{fleet.router.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@pytest.mark.slow
def test_large_answer_does_not_fill_the_memory(fleet: Fleet, client: httpx.Client) -> None:
    """Encoded at once, the answer of 110 MB took 500 MiB, and stopped the event loop for 1.2 s."""
    memory = peak_memory(fleet)
    size = 0
    with client.stream("POST", "/v1/completions", json=prompts(40, prompt_logprobs=20)) as response:
        assert response.status_code == 200
        for data in response.iter_raw():
            size += len(data)
    assert size > 100e6
    assert peak_memory(fleet) < memory + 200


def test_answer_in_pieces_is_that_of_small_requests(client: httpx.Client) -> None:
    """The choices of a large answer are those of small answers, each in one piece."""
    fields = {"logprobs": 3, "echo": True, "prompt_logprobs": 2, "return_token_ids": True}
    large = client.post("/v1/completions", json=prompts(3, **fields))
    assert "content-length" not in large.headers
    for choice, ids in zip(large.json()["choices"], prompts(3)["prompt"], strict=True):
        small = client.post("/v1/completions", json={**prompts(3, **fields), "prompt": ids}).json()["choices"][0]
        assert {**choice, "index": 0} == small
        assert choice["prompt_token_ids"] == ids
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 2001


def test_streamed_echo_equals_the_full_answer(client: httpx.Client) -> None:
    body = prompts(1, logprobs=2, echo=True, return_token_ids=True)
    full = client.post("/v1/completions", json=body).json()["choices"][0]
    lines = client.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == full["prompt_token_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == full["text"]
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"][column]]
        assert streamed == full["logprobs"][column]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 10, "prompt_logprobs": 20}, "the answer would repeat 80000 prompt tokens in 10 choices"),
        ({"n": 10, "echo": True, "logprobs": 20}, "the limit is 134217728"),
    ],
)
def test_limit_of_repeated_prompts_is_in_the_error(client: httpx.Client, fields: dict[str, Any], said: str) -> None:
    response = client.post("/v1/completions", json=prompts(40, **fields))
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


@pytest.mark.slow
def test_answer_beyond_the_memory_of_a_request_ends_with_an_error(client: httpx.Client) -> None:
    body = {"prompt": "hi", "n": 128, "max_tokens": 8000, "logprobs": 20, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "takes more than 67108864 bytes of memory; stream it" in response.json()["error"]["message"]


def test_client_that_leaves_within_a_large_answer_ends_its_request(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json=prompts(40, prompt_logprobs=20)) as response:
        next(response.iter_raw())
    end = time.monotonic() + patience(20.0)
    while "pdserve_requests_in_flight 0.0" not in client.get("/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert 'outcome="disconnected"} 1.0' in client.get("/metrics").text
