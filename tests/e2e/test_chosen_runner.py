"""Nodes whose oracle chose V2 by itself exchange KV and serve, with pipeline stages too. Triton is interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import Fleet, add_tokenizer

from pdserve.config.runner_oracle import VARIABLE

FLAGS = ("--max-batch-tokens", "32", "--max-num-seqs", "4", "--max-model-len", "128", "--kv-cache-memory", "1MiB")
PROMPT = list(range(3, 25))
OUTPUT = 4


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_v2_that_the_oracle_chose_serves_a_handoff_to_pipeline_stages(tmp_path: Path) -> None:
    """No variable forces the runner. P computes the prompt on one rank, D reads it on two stages."""
    model = add_tokenizer(make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2))
    usable = {"TRITON_INTERPRET": "1"}
    with Fleet() as fleet:
        fleet.start_prefill(model, FLAGS, usable)
        fleet.start_decode(model, (*FLAGS, "--pp", "2", "--handoff-min-tokens", "1"), usable)
        fleet.start_router(model)
        fleet.wait_ready()
        for node in fleet.nodes:
            description = node.describe()
            assert description.runner == "V2"
            assert VARIABLE not in "; ".join(description.runner_reasons)
        assert fleet.complete(PROMPT, OUTPUT) == reference_greedy(reference_model(model), PROMPT, OUTPUT)
        (decode,) = fleet.decode
        assert (decode.counter("handoffs"), decode.counter("handoff_failures")) == (1, 0)
