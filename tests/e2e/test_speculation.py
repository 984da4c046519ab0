"""Fleets that speculate answer as without: tokens and log-probabilities, through handoffs, on split nodes, on any pair.

python -m pytest -m slow tests/e2e/test_speculation.py     more models and pairs

A random model rarely copies its prompt, so a logit bias favours a few tokens, which soon repeat.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from eagle3_training import STEPS, PlainEagle3
from eagle3_training import train as train_head
from exact_fleet import STEP, Model, Served, random_prompt
from fleet import MODEL_NAME, Fleet
from predictor_training import FirstDrafts, PlainMiMo, plain_acceptance, train

from training.batches import Generator

LLAMA = Model("llama", {"vocab_size": 4096})  # the tokenizer's vocabulary size, for grammars
MIMO = Model("mimo", {"vocab_size": 4096, "num_hidden_layers": 2})
QWEN35 = Model("qwen3_5_text", {"vocab_size": 4096})
QWEN35_MTP = QWEN35._replace(fields=dict(QWEN35.fields, predicts=True))
STAGED_QWEN35 = QWEN35._replace(  # each of two stages has layers of both kinds
    fields=dict(QWEN35.fields, num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
)

pytestmark = pytest.mark.timeout(300)


def bodies(seed: int) -> list[dict[str, Any]]:
    """Return requests of many kinds; most of their outputs repeat themselves."""
    rng = random.Random(seed)
    requests = []
    for index, length in enumerate((5, 30, STEP, STEP + 1, 3 * STEP + 5, 60)):
        few = rng.sample(range(3, 128), 3)
        body: dict[str, Any] = {
            "prompt": random_prompt(seed + index, length) + few * 3,
            "logit_bias": {str(token): rng.choice((12.0, 30.0)) for token in few},
            "max_tokens": 40,
            "temperature": rng.choice((0.0, 0.7)),
            "seed": index,
            "ignore_eos": True,
        }
        more = ({"logprobs": 3}, {"n": 3}, {"presence_penalty": 0.5, "frequency_penalty": 0.1})
        requests += [body, body | more[index % 3], body | {"stop_token_ids": few[:1], "min_tokens": 9 + index}]
    prompt = random_prompt(seed, 30)
    regexes = ("(river and bridge, ){4,9}end", "[a-z ]{3,9}(, and so on){3,8}")
    return requests + [
        {"prompt": prompt, "max_tokens": 60, "seed": 3, "structured_outputs": {"regex": regex}} for regex in regexes
    ]


def answers(fleet: Fleet, wanted: Sequence[dict[str, Any]], **fields: Any) -> list[Any]:
    """Send all requests at once. Return the choices of each."""

    def answer(body: dict[str, Any]) -> Any:
        whole = {"model": MODEL_NAME, "return_token_ids": True} | body | fields
        reply = fleet.post("/v1/completions", whole, timeout=150.0)
        return reply["choices"]

    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(answer, wanted))


def check(fleet: Fleet, seed: int) -> None:
    wanted = bodies(seed)
    expected = answers(fleet, wanted, disable_spec_decode=True)
    assert not sum(node.counter("spec_decode_num_drafts") for node in fleet.nodes)
    for speculated, choices in zip(answers(fleet, wanted), expected, strict=True):
        for ours, theirs in zip(speculated, choices, strict=True):
            same = ("token_ids", "text", "finish_reason", "stop_reason")
            assert {name: ours.get(name) for name in same} == {name: theirs.get(name) for name in same}
            if theirs["logprobs"] is not None:
                logprobs = (choice["logprobs"]["token_logprobs"] for choice in (ours, theirs))
                assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)


def check_usage(served: Served) -> None:
    """Usage counts drafts of D; a request without drafts has no such field."""
    body = {"model": MODEL_NAME} | bodies(1)[0]
    (node,) = served.fleet.decode
    off = served.fleet.post("/v1/completions", body | {"disable_spec_decode": True})["usage"]
    assert "completion_tokens_details" not in off
    before = drafted(node), accepted(node)
    usage = served.fleet.post("/v1/completions", body)["usage"]
    drafts = drafted(node) - before[0]
    right = accepted(node) - before[1]
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == off["completion_tokens"]
    assert details["accepted_prediction_tokens"] == right > 0
    assert details["rejected_prediction_tokens"] == drafts - right


def drafted(node: Any) -> float:
    return float(node.counter("spec_decode_num_draft_tokens"))


def accepted(node: Any) -> float:
    return float(node.counter("spec_decode_num_accepted_tokens"))


@pytest.mark.parametrize("sides", ["D", *(pytest.param(sides, marks=pytest.mark.slow) for sides in ("P", "PD"))])
def test_answers_are_the_same_through_handoffs(sides: str, tmp_path: Path) -> None:
    """P and D need not speculate alike. Tests with few blocks use drafts on both."""
    prefill, decode = ("1 lookup" if side in sides else "1" for side in "PD")
    with Served(LLAMA, tmp_path / "m", [prefill], [decode]) as served:
        check(served.fleet, seed=1)
        (d,) = served.fleet.decode
        (p,) = served.fleet.prefill
        assert (accepted(d) > 20) == ("D" in sides)
        assert not accepted(p) or "P" in sides
        if sides == "D":
            check_usage(served)
        assert d.counter("handoffs") > 0
        assert d.counter("handoff_failures") == 0
        served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [("1", "pp2"), ("pp2", "tp2"), ("tp2", "pp2"), ("pp2", "1")])
def test_answers_are_the_same_on_split_nodes(prefill: str, decode: str, tmp_path: Path) -> None:
    with Served(LLAMA, tmp_path / "m", [f"{prefill} lookup"], [f"{decode} lookup"]) as served:
        check(served.fleet, seed=2)
        assert accepted(served.fleet.decode[0]) > 20
        served.wait_idle()


@pytest.mark.slow  # tests/engine/test_drafts.py has a quick test
def test_answers_are_the_same_with_few_blocks(tmp_path: Path) -> None:
    """Sequences are preempted, and find prefixes in the cache."""
    few = ("--kv-cache-memory", "390KB")
    with Served(LLAMA, tmp_path / "m", ["1 lookup"], ["1 lookup"], flags=few) as served:
        check(served.fleet, seed=3)
        assert served.fleet.decode[0].counter("preemptions") > 0
        assert accepted(served.fleet.decode[0]) > 20
        served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source"), [(LLAMA, "lookup"), (MIMO, "mtp"), (QWEN35_MTP, "mtp")])
def test_an_answer_continues_on_a_node_that_does_not_speculate(model: Model, source: str, tmp_path: Path) -> None:
    """One of two decode nodes dies while it computes an answer; the other one has no drafts."""
    (body,) = [body | {"max_tokens": 250, "temperature": 0.7} for body in bodies(4)[3:4]]
    with Served(model, tmp_path / "m", [f"1 {source}"], [f"1 {source}", "1"]) as served:
        expected = answers(served.fleet, [body], disable_spec_decode=True)
        node = served.fleet.decode[0]
        with ThreadPoolExecutor(1) as pool:
            continued = pool.submit(answers, served.fleet, [body] * 2)
            served.fleet.wait_until(lambda: drafted(node) > 9, 30.0)
            node.kill()
            assert continued.result() == expected * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("1", "1 lookup"), ("1 lookup", "1"), ("1 lookup", "1 lookup"), ("pp2", "1 lookup"), ("tp2 lookup", "tp2 lookup")],
)
def test_answers_of_recurrent_layers_are_the_same(prefill: str, decode: str, tmp_path: Path) -> None:
    """States are handed off from nodes with drafts and to such nodes."""
    with Served(STAGED_QWEN35, tmp_path / "m", [prefill], [decode], flags=("--state-slots", "24")) as served:
        check(served.fleet, seed=4)
        (d,) = served.fleet.decode
        assert (accepted(d) > 20) == ("lookup" in decode)
        assert d.counter("handoffs") > 0
        assert d.counter("handoff_failures") == 0
        served.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "source", "output"), [(LLAMA, "lookup", 16), (MIMO, "mtp", 10)])
def test_v2_answers_are_those_of_v1(model: Model, source: str, output: int, tmp_path: Path) -> None:
    """With one request of each kind, the longest prompt in two chunks: a step takes the interpreter a second."""
    wanted = [body | {"max_tokens": output} for body in (*bodies(5)[1:9:3], bodies(5)[-1])]
    with Served(model, tmp_path / "v1") as served:
        expected = answers(served.fleet, wanted)
    flags = ("--block-size", "16")
    speculating = [f"1 {source}"]
    with Served(model, tmp_path / "v2", speculating, speculating, flags=flags, runner="V2") as served:
        v2_answers = answers(served.fleet, wanted)
        assert drafted(served.fleet.decode[0]) > 20
    for ours, theirs in zip(v2_answers, expected, strict=True):
        assert [choice["token_ids"] for choice in ours] == [choice["token_ids"] for choice in theirs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        *((MIMO, *sides) for sides in (("1 mtp", "1 mtp"), ("1", "1 mtp"), ("1 mtp", "1"), ("tp2 mtp", "pp2 mtp"))),
        *(
            (QWEN35_MTP, *sides)
            for sides in (("1 mtp", "1 mtp"), ("1", "1 mtp"), ("1 mtp", "1"), ("tp2 mtp", "tp2 mtp"))
        ),
    ],
)
def test_draft_layers_change_no_answer(model: Model, prefill: str, decode: str, tmp_path: Path) -> None:
    """P and D need not both have the layer. Where P lacks it, D makes no drafts behind prompts of P."""
    with Served(model, tmp_path / "m", [prefill], [decode]) as served:
        check(served.fleet, seed=6)
        (d,) = served.fleet.decode
        assert d.counter("handoffs") > 0
        assert d.counter("handoff_failures") == 0
        assert (d.counter("spec_decode_num_drafts") > 100) == ("mtp" in prefill and "mtp" in decode)
        served.wait_idle()


@pytest.mark.slow
def test_drafts_read_an_fp8_cache(tmp_path: Path) -> None:
    """The cache of the draft layer is FP8 as well. Rounded KV may change an answer, drafts may not."""
    flags = ("--kv-cache-dtype", "fp8")
    with Served(MIMO, tmp_path / "m", ["1 mtp"], ["1 mtp"], flags=flags) as served:
        check(served.fleet, seed=7)
        assert drafted(served.fleet.decode[0]) > 100
        served.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("1 eagle3", "1 eagle3"),
        ("1", "1 eagle3"),
        ("1 eagle3", "1"),
        ("1 other-eagle3", "1 eagle3"),
        ("tp2 eagle3", "pp2 eagle3"),
        ("pp2 eagle3", "tp2 eagle3"),
    ],
)
def test_eagle3_heads_change_no_answer(prefill: str, decode: str, tmp_path: Path) -> None:
    """Where P lacks the head of D, also if it has another one, D makes no drafts behind prompts of P."""
    with Served(LLAMA, tmp_path / "m", [prefill], [decode]) as served:
        check(served.fleet, seed=7)
        (d,) = served.fleet.decode
        assert d.counter("handoffs") > 0
        assert d.counter("handoff_failures") == 0
        assert (d.counter("spec_decode_num_drafts") > 100) == (prefill.split()[-1] == decode.split()[-1] == "eagle3")
        served.wait_idle()


@pytest.mark.slow
def test_v2_answers_with_an_eagle3_head_are_those_of_v1(tmp_path: Path) -> None:
    """With few requests: a step takes the interpreter a second."""
    wanted = [body | {"max_tokens": 8} for body in bodies(5)[:4:3]]
    with Served(LLAMA, tmp_path / "v1") as served:
        expected = answers(served.fleet, wanted)
    flags = ("--block-size", "16")
    with Served(LLAMA, tmp_path / "v2", ["1 eagle3"], ["1 eagle3"], flags=flags, runner="V2") as served:
        v2_answers = answers(served.fleet, wanted)
        assert drafted(served.fleet.decode[0]) > 10
    assert [choices[0]["token_ids"] for choices in v2_answers] == [choices[0]["token_ids"] for choices in expected]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_acceptance_after_a_handoff_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """A trained model drafts with the KV of P's layer."""
    directory = tmp_path / "trained"
    train(directory, steps=120)
    check_acceptance(directory, PlainMiMo.read(directory), "auto")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_acceptance_of_an_eagle3_head_after_a_handoff_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """A trained head drafts with the KV that P's head has left."""
    directory = tmp_path / "trained"
    head = tmp_path / "head"
    train(directory, steps=120)
    train_head(head, STEPS, target=directory)
    check_acceptance(directory, PlainEagle3.read(head, directory), f"eagle3:{head}")


def check_acceptance(directory: Path, plain: FirstDrafts, source: str) -> None:
    tokens = Generator(directory / "tokenizer.json", 990_002, evaluating=True).batch([(12, 320)]).tokens
    prompts = [row[:96].tolist() for row in tokens.reshape(12, 320)]
    drafts = ("--speculate", source, "--speculate-when", "always", "--num-drafts", "1")
    flags = (*drafts, "--dtype", "float32", "--threads", "1")
    with Fleet() as fleet:
        fleet.start_prefill(directory, flags)
        fleet.start_decode(directory, (*flags, "--handoff-min-tokens", "0"))
        fleet.start_router(directory)
        fleet.wait_ready()
        bodies = [
            {"prompt": prompt, "max_tokens": 80, "temperature": 0.6, "seed": seed, "ignore_eos": True}
            for seed, prompt in enumerate(prompts)
        ]
        outputs = [choices[0]["token_ids"] for choices in answers(fleet, bodies)]
        (node,) = fleet.decode
        assert node.counter("handoffs") == len(prompts)
        acceptance = accepted(node) / node.counter("spec_decode_num_draft_tokens")
    made, right = map(sum, zip(*map(plain_acceptance, [plain] * len(prompts), prompts, outputs), strict=True))
    assert right > 0.1 * made, "the model has learned too little to tell"
    assert acceptance == pytest.approx(right / made, abs=0.01)
