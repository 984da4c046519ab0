"""Drafts of an EAGLE-3 head are those of a plain loop, and change no answer.

python -m pytest -m slow tests/runner/test_eagle3_drafts.py     a trained head; V2, in Triton's interpreter on CPUs
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3, node_config
from drafted_node import DraftedNode, WatchedNode, run, token_ids_of
from eagle3_training import STEPS, PlainEagle3, train
from predictor_training import plain_acceptance
from predictor_training import train as train_target

from engine.speculation.draft_source import ModelDrafts
from pdserve.sampling_params import SamplingParams
from training.batches import Generator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REQUESTS = [
    (
        random.Random(length).choices(range(3, 128), k=length),
        SamplingParams(most, temperature=t, seed=3, ignore_eos=True),
    )
    for length, most, t in ((1, 20, 0.0), (15, 14, 0.8), (16, 20, 0.0), (70, 14, 1.0))
]


def check(
    target: Path, head: Path, version: str = "V1", requests: Any = REQUESTS, graphs: bool = False, **options: Any
) -> None:
    """Compare answers with answers without drafts, and drafts with a plain loop's."""
    of_v2: dict[str, Any] = {"attention_backend": "triton", "device": DEVICE} if version == "V2" else {}
    expected = run(DraftedNode(node_config(target)), requests)
    config = node_config(target, runner=version, draft_head=head, **of_v2, **options)
    node = WatchedNode(msgspec.structs.replace(config, cuda_graphs=graphs), 3)
    assert token_ids_of(run(node, requests)) == token_ids_of(expected)
    plain = PlainEagle3.read(head, target)
    assert len(node.made) > 10
    assert [list(drafts) for _, drafts in node.made] == [plain.drafts(tokens, 3) for tokens, _ in node.made]


FLAGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"norm_before_residual": True, "norm_output": True, "fc_norm": True, "attention_bias": True},
    "mistral": {"norm_before_fc": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
    "qwen3_moe": {"draft_vocab_size": 128},
}


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in list(FLAGS)[1:])]
)
def test_drafts_are_those_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    """With chunks of prompts beside decodes, and drafts that cross blocks."""
    target = make_checkpoint(tmp_path / "m", family)
    head = make_eagle3(tmp_path / "head", target, **FLAGS[family])
    check(target, head, max_batch_tokens=40, max_num_seqs=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # attention of padding is unspecified
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("graphs", [False, True])
def test_v2_drafts_are_those_of_a_plain_loop(graphs: bool, tmp_path: Path) -> None:
    """With the padding of CUDA graphs, and without. On a CPU their calls run one by one."""
    target = make_checkpoint(tmp_path / "m", "llama")
    head = make_eagle3(tmp_path / "head", target)
    check(target, head, "V2", REQUESTS[1:3], graphs, max_batch_tokens=24, max_num_seqs=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_acceptance_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    target = tmp_path / "target"
    head = tmp_path / "head"
    train_target(target, steps=120)
    train(head, STEPS, target=target)
    plain = PlainEagle3.read(head, target)
    rows = Generator(target / "tokenizer.json", 990_001, evaluating=True).batch([(12, 320)]).tokens
    requests = [
        (row[:64].tolist(), SamplingParams(60, temperature=0.6, seed=index, ignore_eos=True))
        for index, row in enumerate(rows.reshape(12, 320))
    ]
    node = DraftedNode(node_config(target, draft_head=head), 1, ModelDrafts)
    answers = run(node, requests)
    loops = [plain_acceptance(plain, prompt, answers[rid, 0].token_ids) for rid, (prompt, _) in enumerate(requests)]
    made, accepted = (sum(counts) for counts in zip(*loops, strict=True))
    assert accepted > 0.1 * made, "the head has learned too little to tell"
    assert node.num_accepted / node.num_drafts == pytest.approx(accepted / made, abs=0.01)
