"""Models with recurrent layers behind router, decode node and prefill node: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_recurrent_models.py     other models, pairs, and V2 in Triton's interpreter

The reference computes one sequence at a time, since the library's linear attention lets packed ones leak into each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from exact_fleet import STEP, Model, Served, check_moved_answer, check_turns_of_an_agent, random_prompt
from slow_clients import read_tokens, send_unread

_MIXED = [*["linear_attention", "full_attention"] * 2, "linear_attention"]
MIXED = {"num_hidden_layers": 5, "layer_types": _MIXED}
MODELS = {
    "qwen3-next": Model("qwen3_next", {}),
    "qwen3.5": Model("qwen3_5_text", {}),
    "qwen3.5-moe": Model("qwen3_5_moe_text", {}),
    "lfm2": Model("lfm2", {}),
    "lfm2-moe": Model("lfm2_moe", {}),
    "granite-4": Model("granitemoehybrid", {}),
    "nemotron-h": Model("nemotron_h", {}),
    "falcon-h1": Model("falcon_h1", {}),
}
#: Fields with which each of two stages has layers of both kinds, where ``MIXED`` does not.
STAGES: dict[str, dict[str, Any]] = {
    "nemotron-h": {"hybrid_override_pattern": "MEM*-*ME"},
    "falcon-h1": {"num_hidden_layers": 3},
}
FEW_SLOTS = ("--state-slots", "6")

pytestmark = pytest.mark.timeout(300)


def mixed(name: str) -> Model:
    """Return the model with layers of both kinds in each of two stages."""
    if name in STAGES:
        return MODELS[name]._replace(fields=STAGES[name])
    kind = "conv" if name.startswith("lfm2") else "linear_attention"
    layers = [layer.replace("linear_attention", kind) for layer in _MIXED]
    return MODELS[name]._replace(fields=MIXED | {"layer_types": layers})


def check_model(served: Served) -> None:
    """Lengths around those of blocks and steps; together, and again from the prefix caches."""
    shared = random_prompt(7, 2 * STEP + 3)
    prompts = [random_prompt(length, length) for length in (1, 4, 23, STEP, STEP + 1, 3 * STEP + 5)]
    prompts += [shared + random_prompt(100 + index, 3 * index + 1) for index in range(3)]
    prompts += [[*shared[: STEP + index], 5, 6] for index in range(2)]  # branches
    for _ in range(2):
        served.check(prompts)
    decodes = served.fleet.decode
    (prefill,) = served.fleet.prefill
    assert sum(decode.counter("handoffs") for decode in decodes) == 2 * len(prompts)
    assert sum(decode.counter("handoff_failures") for decode in decodes) == 0
    assert prefill.counter("prefix_cached_tokens") > 0
    check_choices(served)
    served.wait_idle()


def check_pauses(served: Served, lengths: Sequence[int], output: int = 250) -> None:
    """Clients stop reading amid their answers, and read on. Some states arrive at a block boundary."""
    node = served.fleet.decode[0]
    prompts = [random_prompt(900 + length, length) for length in lengths]
    fields = {"max_tokens": output, "logprobs": 20, "temperature": 0.0, "return_token_ids": True}
    with ExitStack() as stack:
        clients = [
            stack.enter_context(send_unread(served.fleet.url, {"prompt": prompt, **fields})) for prompt in prompts
        ]
        served.fleet.wait_until(lambda: node.status().paused == len(prompts), 60.0)
        for prompt, client in zip(prompts, clients, strict=True):
            tokens = read_tokens(client)
            assert len(tokens) == output
            assert tokens == served.reference_of(prompt, output, tokens), f"a prompt of {len(prompt)} tokens"


def check_choices(served: Served) -> None:
    """Several choices of a prompt, cached or not: they equal each other, or those of another number with this seed."""

    def choices(prompt: list[int], n: int, **fields: Any) -> list[list[int]]:
        body = {"prompt": prompt, "n": n, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **fields}
        return [choice["token_ids"] for choice in served.fleet.post("/v1/completions", body)["choices"]]

    for length in (41, 64):
        prompt = random_prompt(length, length)
        for _ in range(2):
            assert choices(prompt, 3, temperature=0.0) == [served.reference_of(prompt, 6)] * 3
        sampled = [choices(prompt, n, temperature=1.0, seed=5) for n in (4, 2, 1)]
        assert sampled[1:] == [sampled[0][:2], sampled[0][:1]]
        assert len(set(map(tuple, sampled[0]))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_exact_through_handoffs(name: str, tmp_path: Path) -> None:
    with Served(MODELS[name], tmp_path / "m") as served:
        check_model(served)


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("qwen3.5-moe", "pp2", "1"),
        pytest.param("qwen3-next", "pp2", "1", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "tp2", "tp2", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "1", "pp2", marks=pytest.mark.slow),
        pytest.param("qwen3.5-moe", "pp2", "pp2", marks=pytest.mark.slow),
        pytest.param("qwen3-next", "tp2", "tp2", marks=pytest.mark.slow),
        pytest.param("lfm2", "pp2", "1", marks=pytest.mark.slow),
        pytest.param("lfm2-moe", "tp2", "tp2", marks=pytest.mark.slow),
        pytest.param("granite-4", "pp2", "1", marks=pytest.mark.slow),
        pytest.param("nemotron-h", "tp2", "tp2", marks=pytest.mark.slow),
        pytest.param("nemotron-h", "pp2", "1", marks=pytest.mark.slow),
        pytest.param("falcon-h1", "1", "pp2", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_exact_between_unlike_nodes(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    """Each stage has layers of both kinds."""
    with Served(mixed(name), tmp_path / "m", [prefill], [decode]) as served:
        check_model(served)


@pytest.mark.slow
def test_turns_of_an_agent_are_exact_and_an_answer_moves(tmp_path: Path) -> None:
    """From a node of two stages to two nodes; then a decode node dies while it computes an answer."""
    model = mixed("qwen3.5-moe")
    with Served(model, tmp_path / "m", ["pp2"], ["1", "1"], flags=("--max-model-len", "500")) as served:
        check_model(served)
        check_turns_of_an_agent(served, turns=3)
        check_moved_answer(served)


@pytest.mark.slow
def test_unequal_shards_are_refused_with_both_sizes(tmp_path: Path) -> None:
    """D computes the prompts itself."""
    wait = ("--peer-wait", "1")  # seconds before D is ready without P
    with Served(MODELS["qwen3-next"], tmp_path / "m", ["tp2"], ["1"], decode_flags=wait) as served:
        served.check([random_prompt(1, 20)])
        (decode,) = served.fleet.decode
        refusal = "recurrent states differ in tensor shards: 1 here, 2 at the peer"
        served.fleet.wait_until(lambda: refusal in decode.output, 30.0)
        assert decode.counter("handoffs") == 0


@pytest.mark.slow  # tests/engine/test_state_slots.py has a quick test
def test_tokens_are_exact_with_few_slots_and_blocks(tmp_path: Path) -> None:
    """Sequences wait for slots, and are preempted."""
    flags = (*FEW_SLOTS, "--kv-cache-memory", "900KB")
    with Served(MODELS["qwen3.5"], tmp_path / "m", flags=flags) as served:
        served.check([random_prompt(index, 60 + 7 * index) for index in range(8)], output=60)
        served.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_exact_with_runner_v2(name: str, tmp_path: Path) -> None:
    with Served(MODELS[name], tmp_path / "m", runner="V2", flags=("--block-size", "16")) as served:
        for _ in range(2):
            served.check([random_prompt(length, length) for length in (1, 23, STEP + 6)], output=8)
        decode = served.fleet.decode[0]
        assert decode.describe().runner == "V2"
        assert (decode.counter("handoffs"), decode.counter("handoff_failures")) == (6, 0)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=pytest.mark.timeout(1200))])
def test_a_paused_answer_goes_on_from_its_last_token(runner: str, tmp_path: Path) -> None:
    flags = ("--block-size", "16", "--dtype", "float32")
    with Served(MODELS["qwen3-next"], tmp_path / "m", ["first"], flags=flags, runner=runner) as served:
        check_pauses(served, [63, 64, 65])
        served.wait_idle()


@pytest.mark.slow
def test_a_running_answer_moves_when_its_node_dies(tmp_path: Path) -> None:
    with Served(MODELS["qwen3-next"], tmp_path / "m", ["1"], ["1", "1"]) as served:
        check_moved_answer(served)
