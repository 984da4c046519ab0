"""A model of transformers that is split over ranks, behind router, decode node and prefill node.

    python -m pytest -m slow tests/e2e/test_split_transformers.py

`scripts/test` has split decode nodes in test_transformers_handoff.py, and ranks without processes in tests/runner.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from any_models import make_any_checkpoint
from checkpoints import reference_greedy, reference_model
from fleet import add_tokenizer, start_fleet

FLAGS = ("--max-batch-tokens", "64", "--max-num-seqs", "16", "--max-model-len", "400", "--threads", "1")
OUTPUT = 8  # tokens
SPLITS = {"1": (), "tp2": ("--tp", "2"), "pp2": ("--pp", "2"), "2x2": ("--pp", "2", "--tp", "2")}
PAIRS = [("tp2", "pp2"), ("tp2", "1"), ("1", "pp2"), ("1", "tp2"), ("pp2", "tp2"), ("tp2", "2x2"), ("2x2", "1")]

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_tokens_are_exact_through_a_handoff_between_unlike_nodes(prefill: str, decode: str, tmp_path: Path) -> None:
    directory = add_tokenizer(make_any_checkpoint(tmp_path / "model", "gemma2", tie_word_embeddings=True))
    reference = reference_model(directory)
    prompts = [random.Random(length).choices(range(3, 128), k=length) for length in (1, 17, 150)]
    with start_fleet(
        directory,
        prefill_flags=(*FLAGS, *SPLITS[prefill]),
        decode_flags=[*FLAGS, *SPLITS[decode], "--handoff-min-tokens", "0"],
    ) as fleet:
        for prompt in prompts:
            assert fleet.complete(prompt, OUTPUT) == reference_greedy(reference, prompt, OUTPUT)
        assert fleet.decode[0].counter("handoffs") == len(prompts)
        assert fleet.decode[0].counter("handoff_failures") == 0
