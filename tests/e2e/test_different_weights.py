"""Nodes whose checkpoints differ in one element of one tensor never exchange KV; each pair serves the decode node's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_weight, make_checkpoint, reference_greedy, reference_model
from fleet import Fleet, add_tokenizer

PROMPTS = [[(7 * start + index) % 120 + 3 for index in range(50)] for start in range(4)]
TENSOR = "model.layers.0.self_attn.k_proj.weight"
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384}  # samples of a file of 2.4 MB miss the element


@pytest.mark.slow  # tests/nodes/test_weight_changes.py has a quick test
def test_a_pair_that_differs_in_one_tensor_is_refused_and_answers_are_right(tmp_path: Path) -> None:
    ours = add_tokenizer(make_checkpoint(tmp_path / "ours", "llama", **SIZES))
    theirs = add_tokenizer(make_checkpoint(tmp_path / "theirs", "llama", **SIZES))
    change_weight(theirs, TENSOR)
    weights = ours / "model.safetensors", theirs / "model.safetensors"
    assert weights[0].stat().st_size == weights[1].stat().st_size
    expected = [reference_greedy(reference_model(ours), prompt, 16) for prompt in PROMPTS]
    with Fleet() as fleet:
        fleet.start_prefill(theirs)
        decode = fleet.start_decode(ours, ["--handoff-min-tokens", "0", "--peer-wait", "1"])
        fleet.start_router(ours)
        fleet.wait_ready()
        fleet.wait_until(lambda: "weights of layers.0.self_attn: " in decode.output, 20.0)
        assert decode.describe().compat_hash != fleet.prefill[0].describe().compat_hash
        assert "; and" not in decode.output.partition("weights of")[2]  # nothing else differs
        assert [fleet.complete(prompt, 16) for prompt in PROMPTS] == expected
        assert decode.counter("handoffs") == 0
        assert list(decode.describe().connected_peers) == []
