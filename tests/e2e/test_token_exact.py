"""Greedy float32 tokens through real nodes, with a handoff for every prompt, equal transformers' ``generate``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import Fleet, add_tokenizer, start_fleet
from node_client import RouterClient, greedy

BLOCK = 16
VOCABULARY = 128
OUTPUT = 16  # tokens

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope-tied": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 40, "num_key_value_heads": 1}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {"sliding_window": 40}),
    "glm4-moe": ("glm4_moe", {}),
    "minimax-m2": ("minimax_m2", {}),
}
QUICK = ("llama3-rope-tied",)


@dataclass
class Served:
    fleet: Fleet
    model: Any
    expected: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def reference(self, prompt: list[int], guess: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.expected:
            self.expected[key] = reference_greedy(self.model, prompt, OUTPUT, guess)
        return self.expected[key]

    def check(self, prompts: list[list[int]]) -> None:
        """Send all prompts at once; each must yield the reference's tokens."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            outputs = list(pool.map(lambda prompt: self.fleet.complete(prompt, OUTPUT), prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output == self.reference(prompt, output), f"a prompt of {len(prompt)} tokens"


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, overrides = CHECKPOINTS[request.param]
    directory = add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", family, **overrides))
    with start_fleet(directory, decode_flags=["--handoff-min-tokens", "0"]) as fleet:
        yield Served(fleet, reference_model(directory))


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def test_tokens_are_exact_around_block_and_step_sizes(served: Served) -> None:
    before = served.fleet.decode[0].counter("handoffs")
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2500]
    for length in lengths:
        served.check([random_prompt(length, length)])
    decode = served.fleet.decode[0]
    assert decode.counter("handoffs") == before + len(lengths)
    assert decode.counter("handoff_failures") == 0


def test_sixteen_concurrent_requests_are_exact_with_and_without_prefix_hits(served: Served) -> None:
    shared = random_prompt(7, 5 * BLOCK + 3)
    prompts = [shared + random_prompt(100 + index, 3 * index + 1) for index in range(8)]
    prompts += [random_prompt(200 + index, 11 * index + 2) for index in range(8)]
    served.check(prompts)
    served.check(prompts)  # now all prompts are in the prefix caches
    for node in (*served.fleet.prefill, *served.fleet.decode):
        node.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["--tp 2", "--tp 2 --ep 2", "--pp 2 --tp 2 --ep 2"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "minimax_m2"])
def test_handoff_to_shards_of_a_mixture_of_experts_is_exact(family: str, split: str, tmp_path: Path) -> None:
    """Lengths around those of blocks and of gpt-oss's window, 20 tokens."""
    directory = add_tokenizer(make_checkpoint(tmp_path / "m", family, num_hidden_layers=2))
    decode_flags = [*split.split(), "--handoff-min-tokens", "0"]
    lengths = (1, BLOCK, BLOCK + 1, 20, 21, 150)
    with start_fleet(directory, decode_flags=decode_flags) as fleet:
        Served(fleet, reference_model(directory)).check([random_prompt(length, length) for length in lengths])
        assert fleet.decode[0].counter("handoffs") == len(lengths)
        assert fleet.decode[0].counter("handoff_failures") == 0


def test_decode_node_that_computes_prompts_itself_is_exact(served: Served) -> None:
    (decode,) = served.fleet.decode
    before = decode.counter("handoffs")
    with RouterClient(decode.address) as client:
        for prompt in (random_prompt(300 + length, length) for length in (1, BLOCK, 700)):
            tokens = client.generate(prompt, greedy(OUTPUT)).tokens
            assert tokens == served.reference(prompt, tokens)
    assert decode.counter("handoffs") == before


@pytest.mark.slow
def test_decode_node_alone_is_exact(tmp_path: Path) -> None:
    directory = add_tokenizer(make_checkpoint(tmp_path / "m", "llama"))
    with start_fleet(directory, prefill=0) as fleet:
        Served(fleet, reference_model(directory)).check([random_prompt(length, length) for length in (1, BLOCK, 700)])
        assert fleet.decode[0].counter("handoffs") == 0


@pytest.mark.slow  # tests/connector/test_rank_reads.py has a quick test
def test_handoff_between_different_page_sizes_is_exact(tmp_path: Path) -> None:
    directory = add_tokenizer(make_checkpoint(tmp_path / "m", "llama"))
    pages = [["--block-size", str(BLOCK), "--kernel-block-size", str(page)] for page in (4, BLOCK)]
    decode_flags = [*pages[1], "--handoff-min-tokens", "0"]
    with start_fleet(directory, prefill_flags=pages[0], decode_flags=decode_flags) as fleet:
        Served(fleet, reference_model(directory)).check([random_prompt(length, length) for length in (BLOCK + 1, 200)])
        assert fleet.decode[0].counter("handoffs") == 2
        assert fleet.decode[0].counter("handoff_failures") == 0
