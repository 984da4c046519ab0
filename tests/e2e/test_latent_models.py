"""Models with latent attention behind router, decode node and prefill node: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_latent_models.py     other pairs of sizes, and runner V2 in Triton's interpreter
python -m pytest -m gpu tests/e2e/test_latent_models.py      all nodes on one GPU; needs NIXL
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "v2-lite": Model("deepseek_v2", {"num_hidden_layers": 4, "q_lora_rank": None, "topk_method": "greedy"}),
    "v3": Model("deepseek_v3", {"num_hidden_layers": 4, "rope_parameters": {**YARN, "mscale_all_dim": 0.8}}),
    "glm-lite": Model("glm4_moe_lite", {"num_hidden_layers": 4}),
}
SMALL = ("--kv-cache-memory", "400KB")  # sequences are preempted

pytestmark = pytest.mark.timeout(300)


def check_model(served: Served) -> None:
    """Lengths around those of blocks and steps; together, and again from the prefix caches."""
    shared = random_prompt(7, 2 * STEP + 3)
    prompts = [random_prompt(length, length) for length in (1, BLOCK, 23, STEP + 1, 3 * STEP + 5)]
    prompts += [shared + random_prompt(100 + index, 3 * index + 1) for index in range(3)]
    prompts += [[*shared[: STEP + index], 5, 6] for index in range(2)]  # branches
    for _ in range(2):
        served.check(prompts)
    (decode,) = served.fleet.decode
    assert decode.describe().kv_layout.spec == "latent"
    assert decode.counter("handoffs") > 0
    assert decode.counter("handoff_failures") == 0
    served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_exact_through_handoffs_and_preemption(name: str, tmp_path: Path) -> None:
    with Served(MODELS[name], tmp_path / "m", flags=SMALL) as served:
        check_model(served)
        check_preemption(served)


PAIRS = [("tp2", "pp2"), ("pp2", "1"), ("1", "pp2"), ("pp2", "tp2"), ("1", "tp2"), ("tp2", "1"), ("tp2", "tp2")]
EVERYDAY = [("v3", "tp2", "1")]


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        pytest.param(name, *pair, marks=[] if (name, *pair) in EVERYDAY else pytest.mark.slow)
        for name in ("v2-lite", "v3")
        for pair in PAIRS
    ],
)
def test_tokens_are_exact_between_unlike_nodes(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    """Every tensor shard holds all rows of its layers, so a peer reads them from any one."""
    with Served(MODELS[name], tmp_path / "m", [prefill], [decode]) as served:
        check_model(served)


@pytest.mark.slow
def test_tokens_are_exact_between_unequal_pages(tmp_path: Path) -> None:
    check_unequal_pages(MODELS["v3"], tmp_path / "m", "tp2", "pp2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_tokens_are_exact_with_runner_v2(name: str, tmp_path: Path) -> None:
    """Triton's pages have 16 tokens at least. Fewer layers, as its interpreter is slow."""
    model = MODELS[name]
    fields = {**model.fields, "num_hidden_layers": 2}
    with Served(model._replace(fields=fields), tmp_path / "m", flags=("--block-size", "16"), runner="V2") as served:
        for _ in range(2):
            served.check([random_prompt(length, length) for length in (1, 23, 2 * STEP + 6)], output=8)
        decode = served.fleet.decode[0]
        assert decode.describe().runner == "V2"
        assert (decode.counter("handoffs"), decode.counter("handoff_failures")) == (6, 0)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_exact_on_a_gpu(name: str, runner: str, tmp_path: Path) -> None:
    """In float32, by Triton kernels; V2 captures graphs of decode steps."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    flags = ("--block-size", "16", "--attention-backend", "triton")
    with Served(MODELS[name], tmp_path / "m", flags=flags, runner=runner, device="cuda") as served:
        check_model(served)
        assert {node.describe().runner for node in served.fleet.nodes} == {runner}


@pytest.mark.slow
def test_a_running_answer_moves_when_its_node_dies(tmp_path: Path) -> None:
    with Served(MODELS["v2-lite"], tmp_path / "m", ["1"], ["1", "1"]) as served:
        check_moved_answer(served)
