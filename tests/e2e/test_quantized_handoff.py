"""A Qwen3 checkpoint in FP8 blocks on native layers: tokens are exact through router, decode node and prefill node.

The decode node has two pipeline stages of two tensor shards, whose boundaries lie within blocks.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import add_tokenizer, start_fleet
from quantized_checkpoints import quantize

OUTPUT = 8  # tokens
FLAGS = ("--max-batch-tokens", "64", "--max-num-seqs", "8", "--max-model-len", "256", "--threads", "1")
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [("fp8 blocks", "fp8"), ("nvfp4", "modelopt")])
def test_quantized_weights_are_exact_through_a_handoff_to_tensor_shards(name: str, method: str, tmp_path: Path) -> None:
    plain = add_tokenizer(make_checkpoint(tmp_path / "plain", "qwen3", **SIZES))
    directory = quantize(plain, tmp_path / "quantized", name)
    reference = reference_model(plain)
    prompts = [random.Random(length).choices(range(3, 128), k=length) for length in (1, 16, 17, 150)]
    expected = [reference_greedy(reference, prompt, OUTPUT) for prompt in prompts]
    decode_flags = [*FLAGS, "--tp", "2", "--pp", "2", "--handoff-min-tokens", "0"]
    with start_fleet(directory, prefill_flags=FLAGS, decode_flags=decode_flags) as fleet:
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(lambda prompt: fleet.complete(prompt, OUTPUT), prompts)) == expected
        decode = fleet.decode[0]
        assert decode.counter("handoffs") == len(prompts)
        assert decode.counter("handoff_failures") == 0
        description = decode.describe()
        assert description.runner == "V1"
        assert any("quantization" in reason for reason in description.runner_reasons)
        assert f"weights are {method}, dequantized when loaded" in fleet.prefill[0].output
