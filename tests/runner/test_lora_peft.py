"""Adapters that PEFT has written sample the tokens of the model into which PEFT merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from lora_adapters import LIMITS, load, with_adapters
from stepper import Stepper

import runner
from pdserve.adapters.adapter import NO_ADAPTER_SLOT, AdapterSlot

RANKS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 32},
    "rslora": {"r": 6, "lora_alpha": 12, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_(b_)?proj": 12, "o_proj": 2},
        "alpha_pattern": {r"layers\.1\..*": 40},
    },
}
#: target_modules of each adapter. PEFT takes the projections of experts as one tensor, which is not served.
TARGETS: dict[str, tuple[list[str] | str, list[str] | str, list[str] | str]] = {
    "llama": (["q_proj", "v_proj", "o_proj", "down_proj"], ["k_proj", "up_proj"], r".*\.(q_proj|o_proj|gate_proj)"),
    "qwen3": (["q_proj", "v_proj", "o_proj", "down_proj"], ["k_proj", "up_proj"], r".*\.(q_proj|o_proj|gate_proj)"),
    "qwen3_moe": (["q_proj", "v_proj", "o_proj"], ["v_proj", "k_proj"], r".*\.(q_proj|o_proj)"),
    "qwen3_5_text": (
        ["q_proj", "v_proj", "o_proj", "down_proj", "in_proj_z"],
        ["k_proj", "up_proj", "in_proj_a", "out_proj"],
        r".*\.(q_proj|gate_proj|o_proj|out_proj|in_proj_qkv|in_proj_b)",
    ),
    "deepseek_v3": (["q_b_proj", "o_proj"], ["q_a_proj", "kv_a_proj_with_mqa"], r".*\.(q_b_proj|o_proj)"),
}
PROMPT = [5, 17, 90, 3, 64, 31, 8]


def save_with_peft(base: Path, target: Path, seed: int, config: dict[str, Any]) -> Any:
    """Save a random adapter, whose B is not zero, and return the merged model."""
    import peft
    import torch

    torch.manual_seed(seed)
    model = peft.get_peft_model(reference_model(base), peft.LoraConfig(init_lora_weights=False, **config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.1)
    model.save_pretrained(target)
    return model.merge_and_unload()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", TARGETS)
def test_adapters_of_peft_sample_as_merge_and_unload(tmp_path: Path, family: str) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    merged = []
    for seed, (name, targets) in enumerate(zip(RANKS, TARGETS[family], strict=True)):
        merged.append(save_with_peft(base, tmp_path / name, seed, RANKS[name] | {"target_modules": targets}))
    config = with_adapters(node_config(base), LIMITS)
    stepper = Stepper(runner.build(config, lambda stage, fraction: None))
    for slot, name in enumerate(RANKS):
        adapter = load(tmp_path / name, base)
        stepper.runner.load_adapter(adapter)
        stepper.filling.append(AdapterSlot(slot, adapter.digest))
    slots = [*range(len(RANKS)), NO_ADAPTER_SLOT]
    actual = stepper.generate([PROMPT] * len(slots), 8, adapter_slots=slots)
    expected = [reference_greedy(model, PROMPT, 8) for model in (*merged, reference_model(base))]
    assert [one.output for one in actual] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "an adapter changes no token"
