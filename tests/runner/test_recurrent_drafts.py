"""Models with recurrent layers verify drafts: their states, and snapshots of these, are those of accepted tokens only.

python -m pytest -m slow tests/runner/test_recurrent_drafts.py     V2, in Triton's interpreter on CPUs
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from drafted_node import Answers, DraftedNode, Oracle

from engine.recurrent import state_slots
from pdserve.config.node_config import NodeConfig
from pdserve.sampling_params import SamplingParams

VOCAB = 128
Request = tuple[list[int], SamplingParams]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"hybrid_override_pattern": "M*ME"},
    "falcon_h1": {},
}
_SLOW = ("nemotron_h", "falcon_h1")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in FAMILIES]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, **FAMILIES[request.param])


@pytest.fixture(autouse=True)
def short_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "DECODE_DISTANCE", 16)


def config_of(checkpoint: Path, version: str = "V1", graphs: bool = False, **options: Any) -> NodeConfig:
    if version == "V2":
        options = {"attention_backend": "triton", "device": DEVICE} | options
    return msgspec.structs.replace(node_config(checkpoint, runner=version, **options), cuda_graphs=graphs)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def tokens_of(answers: Answers) -> dict[tuple[int, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


class Conversations:
    """Sends prompts, and then each prompt with the first tokens of its answer and more: prefixes end in answers."""

    def __init__(self, node: DraftedNode) -> None:
        self._node = node

    def run(self, requests: Sequence[Request]) -> dict[tuple[int, int], list[int]]:
        node = self._node
        for rid, request in enumerate(requests):
            node.submit(rid, *request)
        node.run()
        for rid, (prompt, sampling) in enumerate(requests):
            node.submit(100 + rid, prompt + node.answers[rid, 0].token_ids[:-2] + [5, 6, 7], sampling)
        node.run()
        node.close()
        return tokens_of(node.answers)


def draft_always(texts: Sequence[list[int]], wrong: float) -> Any:
    numbers = iter(range(10**6))
    return lambda: Oracle(texts, wrong, VOCAB, next(numbers))


REQUESTS = [
    (prompt_of(length, length), SamplingParams(40, temperature=temperature, seed=length, n=n, ignore_eos=True))
    for length, temperature, n in ((1, 0.0, 1), (15, 0.8, 1), (33, 1.0, 2), (40, 0.8, 1))
]


@pytest.mark.parametrize("slots", [24, 7])
def test_snapshots_are_those_of_accepted_tokens(checkpoint: Path, slots: int) -> None:
    """Prompts continue answers whose snapshots were taken among drafts. With few slots sequences are preempted."""
    expected = Conversations(DraftedNode(config_of(checkpoint, num_blocks=200, state_slots=64))).run(REQUESTS)
    texts = [REQUESTS[rid][0] + tokens for (rid, _), tokens in expected.items() if rid < 100]
    config = config_of(checkpoint, num_blocks=200, state_slots=slots, max_batch_tokens=40, max_num_seqs=5)
    node = DraftedNode(config, 3, draft_always(texts, wrong=0.3))
    assert Conversations(node).run(REQUESTS) == expected
    assert node.num_accepted > 40
    if slots > 10:
        cached = node.scheduler.totals.prefix_cached_tokens
        assert cached > sum(len(prompt) for prompt, _ in REQUESTS) + 40, "no snapshot of an answer was found"


def check_v2(checkpoint: Path, graphs: bool, requests: Sequence[Request]) -> None:
    expected = Conversations(DraftedNode(config_of(checkpoint, state_slots=24))).run(requests)
    texts = [requests[rid][0] + tokens for (rid, _), tokens in expected.items() if rid < 100]
    config = config_of(checkpoint, "V2", graphs, state_slots=24, max_batch_tokens=40, max_num_seqs=4)
    node = DraftedNode(config, 3, draft_always(texts, wrong=0.3))
    assert Conversations(node).run(requests) == expected
    assert node.num_accepted > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("graphs", [False, True])
def test_v2_states_are_those_of_accepted_tokens(checkpoint: Path, graphs: bool) -> None:
    """Also with the padding of graphs; on a CPU their calls run one by one."""
    requests = [(prompt, msgspec.structs.replace(sampling, max_tokens=20, n=1)) for prompt, sampling in REQUESTS[:3]]
    check_v2(checkpoint, graphs, requests)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_states_on_a_gpu_are_those_of_accepted_tokens(checkpoint: Path, graphs: bool) -> None:
    """In float32, beside V1 on the CPU. Prompts join, and answers end at different steps."""
    requests = [
        (prompt, msgspec.structs.replace(sampling, max_tokens=30 + 7 * index, n=1))
        for index, (prompt, sampling) in enumerate(REQUESTS * 2)
    ]
    check_v2(checkpoint, graphs, requests)
