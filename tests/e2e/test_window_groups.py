"""Models with sliding windows behind router, decode node and prefill node: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_window_groups.py     other models and pairs, and V2 in Triton's interpreter

Windows are short, so that blocks behind them are freed in all prompts here, on both sides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import GEMMA4_SIZES
from exact_fleet import (
    BLOCK,
    STEP,
    Model,
    Served,
    check_moved_answer,
    check_preemption,
    check_unequal_pages,
    random_prompt,
)  # fmt: skip

SMALL = ("--kv-cache-memory", "800KB")  # sequences are preempted

pytestmark = pytest.mark.timeout(300)


MODELS = {
    "gpt-oss": Model("gpt_oss", {"num_hidden_layers": 6, "sliding_window": 11}),
    # 2 full layers, and 11 in groups of 2: one has padding
    "gemma3": Model("gemma3_text", {"num_hidden_layers": 13, "sliding_window": 9}, from_library=True),
    "ministral": Model(
        "mistral",
        {
            "num_hidden_layers": 8,
            "sliding_window": 21,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
        },
    ),
    "gemma-4-e2b": Model("gemma4_text", GEMMA4_SIZES["E2B"] | {"sliding_window": 11}),
    "gemma-4-26b": Model("gemma4_text", GEMMA4_SIZES["26B-A4B"] | {"sliding_window": 11}),
    "all windows": Model("mistral", {"num_hidden_layers": 2, "sliding_window": 18}),
}
NUM_GROUPS = {"gpt-oss": 2, "gemma3": 7, "ministral": 4, "gemma-4-e2b": 2, "gemma-4-26b": 3, "all windows": 1}


def check_model(served: Served, num_groups: int) -> None:
    """Lengths around those of blocks, windows and steps; together, and again from the prefix caches."""
    shared = random_prompt(7, 2 * STEP + 3)
    prompts = [random_prompt(length, length) for length in (1, BLOCK, 12, 23, STEP, STEP + 1, 3 * STEP + 5)]
    prompts += [shared + random_prompt(100 + index, 3 * index + 1) for index in range(3)]
    prompts += [[*shared[: STEP + index], 5, 6] for index in range(2)]  # branches
    for _ in range(2):
        served.check(prompts)
    (decode,) = served.fleet.decode
    assert decode.describe().kv_layout.group_windows
    assert len(decode.describe().kv_layout.group_windows) == num_groups
    assert decode.counter("handoff_failures") == 0
    assert decode.counter("preemptions") == 0
    served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_exact_through_handoffs(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    with Served(model, tmp_path / "m") as served:
        check_model(served, NUM_GROUPS[name])


PAIRS = [("tp2", "pp2"), ("pp2", "1"), ("1", "pp2"), ("pp2", "tp2"), ("1", "tp2"), ("pp2", "pp2")]
EVERYDAY = [("gpt-oss", "pp2", "1")]


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        pytest.param(name, *pair, marks=[] if (name, *pair) in EVERYDAY else pytest.mark.slow)
        for name in MODELS
        for pair in PAIRS
        if name != "gemma-4-e2b" or "pp2" not in pair  # its layers read the KV of others
    ],
)
def test_tokens_are_exact_between_unlike_nodes(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    """Stages have other numbers of layers of each group, so blocks are cut by group."""
    model = MODELS[name]
    with Served(model, tmp_path / "m", [prefill], [decode]) as served:
        check_model(served, NUM_GROUPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "ministral"])
def test_tokens_are_exact_between_unequal_pages(name: str, tmp_path: Path) -> None:
    check_unequal_pages(MODELS[name], tmp_path / "m", "1", "pp2")


@pytest.mark.slow  # tests/engine/test_windows.py has a quick test
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_tokens_are_exact_under_preemption(name: str, tmp_path: Path) -> None:
    with Served(MODELS[name], tmp_path / "m", flags=SMALL) as served:
        check_preemption(served)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt-oss", "ministral", "all windows"])
def test_tokens_are_exact_with_runner_v2(name: str, tmp_path: Path) -> None:
    """Triton's pages have 16 tokens at least. Fewer layers, as its interpreter is slow: a group may have one."""
    model = MODELS[name]
    fields = dict(MODELS[name].fields, num_hidden_layers=2)
    if "layer_types" in fields:
        fields |= {"num_hidden_layers": 3, "layer_types": fields["layer_types"][:3]}
    flags = ("--block-size", "16")
    with Served(model._replace(fields=fields), tmp_path / "m", flags=flags, runner="V2") as served:
        for _ in range(2):
            served.check([random_prompt(length, length) for length in (1, 23, 2 * STEP + 6)], output=8)
        decode = served.fleet.decode[0]
        assert decode.describe().runner == "V2"
        assert (decode.counter("handoffs"), decode.counter("handoff_failures")) == (6, 0)


@pytest.mark.slow
def test_a_running_answer_moves_when_its_node_dies(tmp_path: Path) -> None:
    with Served(MODELS["gpt-oss"], tmp_path / "m", ["1"], ["1", "1"]) as served:
        check_moved_answer(served)
