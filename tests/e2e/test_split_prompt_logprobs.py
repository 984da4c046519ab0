"""Prompt log-probabilities of multi-rank nodes equal those of transformers.

python -m pytest -m slow tests/e2e/test_split_prompt_logprobs.py
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, reference_model
from fleet import Fleet
from node_client import RouterClient, greedy

STEP = 16  # tokens


@pytest.mark.slow
def test_multi_rank_nodes_are_exact(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama", vocab_size=131)
    prompt = random.Random(3).choices(range(131), k=3 * STEP + 5)
    with torch.no_grad():
        logits = reference_model(checkpoint)(torch.tensor([prompt])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    flags = ("--dtype", "float32", "--max-batch-tokens", str(STEP), "--max-num-seqs", "4", "--max-model-len", "128")
    with Fleet() as fleet:
        for split in (("--pp", "2"), ("--tp", "2")):
            fleet.start_decode(checkpoint, (*flags, *split))
        fleet.wait_ready()
        for node in fleet.decode:
            with RouterClient(node.address) as client:
                answer = client.generate(prompt, greedy(2, n=2, prompt_logprobs=1))
            assert [len(tokens) for tokens in answer.choices.values()] == [2, 2]
            table = b"".join(part.table for part in answer.prompt_logprobs)
            own = [row[0] for row in struct.iter_unpack("<fIIf", table)]
            assert own == pytest.approx(expected, abs=1e-4)
            assert [part.first for part in answer.prompt_logprobs] == list(range(1, len(prompt), STEP))
