"""Models that run through transformers, behind router, decode node and prefill node: greedy tokens are exact.

python -m pytest -m slow tests/e2e/test_transformers_handoff.py      the other families

The KV of every family is copied to another runner in tests/runner/test_transformers_models.py.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from any_models import FAMILIES, make_any_checkpoint
from checkpoints import reference_greedy, reference_model
from fleet import add_tokenizer, start_fleet
from quantized_checkpoints import quantize

BLOCK = 16  # tokens
STEP = 64  # tokens
OUTPUT = 8  # tokens of an answer
FLAGS = ("--max-batch-tokens", str(STEP), "--max-num-seqs", "16", "--max-model-len", "400", "--threads", "1")

#: Two of the families are quantized: per-expert weights in FP8 blocks, and fused experts in MXFP4.
QUANTIZED = {"qwen3_moe": "fp8 blocks", "gpt_oss": "mxfp4"}
#: Decode nodes of quantized families are split, so ranks dequantize parts of weights.
SPLIT = {"qwen3_moe": ("--tp", "2", "--ep", "2"), "gpt_oss": ("--pp", "2")}

EVERYDAY = ("qwen3_moe",)  # split and quantized; test_window_groups.py has another one, with windows

pytestmark = pytest.mark.timeout(240)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)


@pytest.mark.parametrize(
    "model_type", [pytest.param(family, marks=[] if family in EVERYDAY else pytest.mark.slow) for family in FAMILIES]
)
def test_tokens_are_exact_through_a_handoff(model_type: str, tmp_path: Path) -> None:
    """Prompts around block and step sizes, together and again from the prefix caches.

    The reference of a quantized checkpoint is the unquantized model of the same numbers in float32.
    """
    directory = plain = add_tokenizer(make_any_checkpoint(tmp_path / "model", model_type))
    if model_type in QUANTIZED:
        directory = quantize(plain, tmp_path / "quantized", QUANTIZED[model_type])
    reference = reference_model(plain)
    shared = random_prompt(7, 2 * BLOCK + 3)
    prompts = [random_prompt(length, length) for length in (1, BLOCK, BLOCK + 1, 3 * STEP + 5)]
    prompts += [shared + random_prompt(100 + index, 3 * index + 1) for index in range(3)]
    expected = [reference_greedy(reference, prompt, OUTPUT) for prompt in prompts]
    decode_flags = [*FLAGS, *SPLIT.get(model_type, ()), "--handoff-min-tokens", "0"]
    with start_fleet(directory, prefill_flags=FLAGS, decode_flags=decode_flags) as fleet:
        with ThreadPoolExecutor(len(prompts)) as pool:
            for _ in range(2):
                assert list(pool.map(lambda prompt: fleet.complete(prompt, OUTPUT), prompts)) == expected
        decode = fleet.decode[0]
        assert decode.counter("handoffs") == 2 * len(prompts)
        assert decode.counter("handoff_failures") == 0
        assert decode.describe().runner == "V1"
