"""Simulated nodes of a model with recurrent layers count its slots and snapshots as real ones do."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fleet import Fleet, add_tokenizer, start_fleet
from make_checkpoint import SHAPES

BLOCK = 16
SLOTS = 4
FLAGS = ("--engine", "simulated", "--sim-costs", "step=0.004", "--block-size", str(BLOCK), "--kv-cache-memory", "8GiB")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(SHAPES["qwen3-next-12l"]))
    decode = (*FLAGS, "--state-slots", str(SLOTS), "--handoff-min-tokens", "0")
    with start_fleet(add_tokenizer(directory), prefill_flags=FLAGS, decode_flags=decode) as fleet:
        yield fleet


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=length)


def cached_tokens(fleet: Fleet, prompt: list[int], **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    cached = fleet.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return cached


def test_prefix_hits_end_at_snapshots(fleet: Fleet) -> None:
    shared = prompt_of(5 * BLOCK, 1)
    prompts = [shared + prompt_of(2 * BLOCK + 5, seed) for seed in (2, 3, 4)]
    assert [cached_tokens(fleet, prompt) for prompt in prompts] == [0, 0, len(shared)]
    assert cached_tokens(fleet, prompts[0]) == 7 * BLOCK
    assert fleet.decode[0].counter("handoffs") == 4


def test_slots_bound_the_running_sequences(fleet: Fleet) -> None:
    (decode,) = fleet.decode
    with ThreadPoolExecutor(3 * SLOTS) as pool:
        prompts = [prompt_of(40, 100 + seed) for seed in range(3 * SLOTS)]
        answers = [pool.submit(fleet.complete, prompt, 100) for prompt in prompts]
        running = [0]
        while not all(answer.done() for answer in answers):
            running.append(decode.status().running)
        assert all(len(answer.result()) == 100 for answer in answers)
    assert 1 < max(running) <= SLOTS
    decode.wait_idle()
