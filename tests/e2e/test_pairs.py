"""Handoffs between prefill and decode nodes of any parallel sizes yield the tokens of a single-rank node.

    python -m pytest -m slow tests/e2e/test_pairs.py      all pairs of sizes with both runners

scripts/test has pairs of models whose blocks are harder to cut, in test_window_groups.py and test_latent_models.py.
Every prompt is handed off. Counters prove that its KV was read and not recomputed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess
from node_client import Generated, RouterClient, greedy

from pdserve.model.model_config import ModelConfig, load_model_config
from pdserve.sampling_params import SamplingParams

BLOCK = 16  # tokens
STEP = 32  # tokens; a prompt that is longer than a step is announced and read in parts
VOCABULARY = 128
OUTPUT = 6  # tokens
ALL_START_SECONDS = 300.0  # 26 processes
ANSWER_SECONDS = 600.0  # in Triton's interpreter, a step of V2 takes seconds per shard
FLAGS = ("--block-size", str(BLOCK), "--max-batch-tokens", str(STEP), "--max-num-seqs", "8", "--max-model-len", "256")
SMALL = ("--kv-cache-memory", "2MiB")

ONE = "1x1"
SPLITS = {ONE: (1, 1), "pp2": (2, 1), "tp2": (1, 2), "pp2xtp2": (2, 2)}  # pipeline stages, tensor shards
ALL = list(itertools.product(SPLITS, SPLITS))

# Two tensor shards replicate a single KV head, and have one of two KV heads each.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "V1": ("qwen3", {"tie_word_embeddings": True}),
    "V2": (
        "mistral",
        {"sliding_window": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
}


@dataclass(frozen=True)
class PromptRequest:
    prompt: list[int]
    sampling: SamplingParams


def _prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCABULARY), k=length)


REQUESTS = [
    *(PromptRequest(_prompt(length), greedy(OUTPUT)) for length in (1, BLOCK, BLOCK + 1)),
    PromptRequest(_prompt(3 * STEP + 5), greedy(OUTPUT, logprobs=2)),
    PromptRequest(_prompt(2 * STEP), SamplingParams(OUTPUT, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)),
    PromptRequest(
        _prompt(STEP + 3), SamplingParams(OUTPUT, n=3, temperature=1.0, seed=11, logprobs=0, ignore_eos=True)
    ),
]


@dataclass
class Nodes:
    """Nodes by parallel sizes. Every P is a peer of every D."""

    model: ModelConfig
    prefill: dict[str, NodeProcess]
    decode: dict[str, NodeProcess]
    expected: list[Generated] = field(default_factory=list)  # outputs of a single-rank node without a handoff

    def bytes_read(self, target: str) -> int:
        """Return the bytes of KV of all requests on the ranks of a D; replicated heads count once per shard."""
        tp = SPLITS[target][1]
        of_block = self.model.num_layers * 2 * BLOCK * self.model.head_dim * 4 * max(self.model.num_kv_heads, tp)
        return of_block * sum(-(-len(request.prompt) // BLOCK) for request in REQUESTS)


@contextmanager
def start_nodes(checkpoint: Path, runner: str, sources: Sequence[str], targets: Sequence[str]) -> Iterator[Nodes]:
    environ = RUNNER_ENVIRONMENTS[runner]
    with Fleet() as fleet:
        lease = ("--lease-seconds", "60")  # long, because reads are posted between slow steps
        prefill = {name: fleet.start_prefill(checkpoint, [*flags_of(name), *lease], environ) for name in sources}
        flags = ("--handoff-min-tokens", "0")
        decode = {name: fleet.start_decode(checkpoint, [*flags_of(name), *flags], environ) for name in targets}
        fleet.wait_ready(ALL_START_SECONDS)
        nodes = Nodes(load_model_config(checkpoint), prefill, decode)
        nodes.expected = send_all(decode[ONE].address, "", "no handoff")
        yield nodes


def flags_of(split: str) -> list[str]:
    pp, tp = SPLITS[split]
    return [*FLAGS, *SMALL, "--pp", str(pp), "--tp", str(tp)]


def send_all(address: str, peer: str, salt: str) -> list[Generated]:
    """Send all requests at once and return their outputs."""
    with RouterClient(address) as client:
        results = [client.send(request.prompt, request.sampling, peer, cache_salt=salt) for request in REQUESTS]
        return [result.wait(ANSWER_SECONDS) for result in results]


def check_pair(nodes: Nodes, source: str, target: str) -> None:
    prefill = nodes.prefill[source]
    decode = nodes.decode[target]
    names = ("handoffs", "handoff_failures", "handoff_recomputes", "local_prefills", "kv_reads", "kv_read_bytes")
    before = {name: decode.counter(name) for name in names}
    answers = send_all(decode.address, prefill.address, f"{source} to {target}")
    for answer, expected, request in zip(answers, nodes.expected, REQUESTS, strict=True):
        assert answer.failure is None
        assert answer.choices == expected.choices, f"a prompt of {len(request.prompt)} tokens"
        assert answer.finish == expected.finish
        assert_same_logprobs(answer, expected)
    counted = {name: decode.counter(name) - before[name] for name in names}
    num_reads = counted.pop("kv_reads")
    assert counted == {
        "handoffs": len(REQUESTS),
        "handoff_failures": 0,
        "handoff_recomputes": 0,
        "local_prefills": 0,
        "kv_read_bytes": nodes.bytes_read(target),
    }, decode.output[-3000:]
    assert num_reads > len(REQUESTS), "long prompts are read in parts"
    for node in (prefill, decode):
        node.wait_idle()


def assert_same_logprobs(answer: Generated, expected: Generated) -> None:
    assert answer.logprobs.keys() == expected.logprobs.keys()
    for choice, tokens in expected.logprobs.items():
        for got, wanted in zip(answer.logprobs[choice], tokens, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert list(got.top_ids) == list(wanted.top_ids)
            assert list(got.top_logprobs) == pytest.approx(list(wanted.top_logprobs), abs=1e-4)


@pytest.fixture(scope="module", params=RUNNER_ENVIRONMENTS)
def all_nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    family, overrides = CHECKPOINTS[request.param]
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("all") / "model", family, **overrides)
    with start_nodes(checkpoint, request.param, list(SPLITS), list(SPLITS)) as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "target"), ALL)
def test_all_pairs_of_parallel_sizes_are_exact(source: str, target: str, all_nodes: Nodes) -> None:
    check_pair(all_nodes, source, target)
