"""Models with sliding windows behind router, decode node and prefill node: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_window_groups.py     other pairs of sizes, and runner V2 in Triton's interpreter

Windows are short, so that blocks behind them are freed in all prompts here, on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from any_models import make_any_checkpoint
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess, add_tokenizer

BLOCK, STEP, OUTPUT = 4, 48, 24  # tokens: of a block, a step and an answer
FLAGS = ("--block-size", str(BLOCK), "--max-batch-tokens", str(STEP), "--max-num-seqs", "8", "--max-model-len", "400")
FLAGS += ("--threads", "1", "--kv-checksum", "on")
SPLITS = {"1": (), "tp2": ("--tp", "2"), "pp2": ("--pp", "2")}
SMALL = ("--kv-cache-memory", "800KB")  # sequences are preempted

pytestmark = pytest.mark.timeout(300)


class Model(NamedTuple):
    """A checkpoint, and how many groups of the KV cache it has."""

    family: str
    fields: Mapping[str, Any]
    num_groups: int
    from_library: bool = False

    def make(self, path: Path) -> Path:
        if self.from_library:
            return add_tokenizer(make_any_checkpoint(path, self.family, **self.fields))
        return add_tokenizer(make_checkpoint(path, self.family, **self.fields))


MODELS = {
    "gpt-oss": Model("gpt_oss", {"num_hidden_layers": 6, "sliding_window": 11}, 2),
    # 2 full layers, and 11 in groups of 2: one has padding
    "gemma3": Model("gemma3_text", {"num_hidden_layers": 13, "sliding_window": 9}, 7, from_library=True),
    "ministral": Model(
        "mistral",
        {
            "num_hidden_layers": 8,
            "sliding_window": 21,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
        },
        4,
    ),
    "all windows": Model("mistral", {"num_hidden_layers": 2, "sliding_window": 18}, 1),
}


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)


class Served:
    """A fleet of some prefill and decode nodes; answers are compared with the library's."""

    def __init__(
        self, model: Model, path: Path, prefill: Sequence[str] = ("1",), decode: Sequence[str] = ("1",), *,
        flags: Sequence[str] = (), runner: str = "V1",
    ) -> None:  # fmt: skip
        directory, environ = model.make(path), RUNNER_ENVIRONMENTS[runner]
        self.reference = reference_model(directory)
        self.fleet = Fleet()
        for split in prefill:
            self.fleet.start_prefill(directory, (*FLAGS, *flags, *SPLITS[split]), environ)
        for split in decode:
            more = (*flags, *SPLITS[split], "--handoff-min-tokens", "0")
            self.fleet.start_decode(directory, (*FLAGS, *more), environ)
        self.fleet.start_router(directory)

    def __enter__(self) -> Served:
        self.fleet.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.fleet.close()

    def check(self, prompts: Sequence[list[int]], output: int = OUTPUT) -> None:
        """Send prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: self.fleet.complete(prompt, output), prompts))
        for prompt, tokens in zip(prompts, found, strict=True):
            assert tokens == reference_greedy(self.reference, prompt, output), f"a prompt of {len(prompt)} tokens"

    def wait_idle(self) -> None:
        for node in self.fleet.nodes:
            status = node.wait_idle()
            assert status.free_blocks == status.total_blocks


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


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_exact_through_handoffs(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    with Served(model, tmp_path / "m") as served:
        check_model(served, model.num_groups)


PAIRS = [("tp2", "pp2"), ("pp2", "1"), ("1", "pp2"), ("pp2", "tp2"), ("1", "tp2"), ("pp2", "pp2")]
EVERYDAY = [("gpt-oss", "pp2", "tp2"), ("ministral", "1", "pp2")]


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        pytest.param(name, *pair, marks=[] if (name, *pair) in EVERYDAY else pytest.mark.slow)
        for name in MODELS
        for pair in PAIRS
    ],
)
def test_tokens_are_exact_between_unlike_nodes(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    """Stages have other numbers of layers of each group, so blocks are cut by group."""
    model = MODELS[name]
    with Served(model, tmp_path / "m", [prefill], [decode]) as served:
        check_model(served, model.num_groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "ministral"])
def test_tokens_are_exact_between_unequal_pages(name: str, tmp_path: Path) -> None:
    directory, pages = (
        MODELS[name].make(tmp_path / "m"),
        [("--block-size", "8", "--kernel-block-size", p) for p in "28"],
    )
    reference, prompt = reference_model(directory), random_prompt(1, 101)
    with Fleet() as fleet:
        fleet.start_prefill(directory, (*FLAGS, *pages[0]))
        fleet.start_decode(directory, (*FLAGS, *pages[1], "--pp", "2", "--handoff-min-tokens", "0"))
        fleet.start_router(directory)
        fleet.wait_ready()
        assert fleet.complete(prompt, OUTPUT) == reference_greedy(reference, prompt, OUTPUT)
        assert (fleet.decode[0].counter("handoffs"), fleet.decode[0].counter("handoff_failures")) == (1, 0)


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_tokens_are_exact_under_preemption(name: str, tmp_path: Path) -> None:
    with Served(MODELS[name], tmp_path / "m", flags=SMALL) as served:
        served.check([random_prompt(index, 60 + 7 * index) for index in range(8)], output=60)
        assert served.fleet.decode[0].counter("preemptions") > 0
        served.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt-oss", "ministral", "all windows"])
def test_tokens_are_exact_with_runner_v2(name: str, tmp_path: Path) -> None:
    """Triton's pages have 16 tokens at least. Fewer layers, as its interpreter is slow: a group may have one."""
    model, fields = MODELS[name], dict(MODELS[name].fields, num_hidden_layers=2)
    if "layer_types" in fields:
        fields |= {"num_hidden_layers": 3, "layer_types": fields["layer_types"][:3]}
    flags = ("--block-size", "16")
    with Served(model._replace(fields=fields), tmp_path / "m", flags=flags, runner="V2") as served:
        for _ in range(2):
            served.check([random_prompt(length, length) for length in (1, 23, 2 * STEP + 6)], output=8)
        decode = served.fleet.decode[0]
        assert decode.describe().runner == "V2"
        assert (decode.counter("handoffs"), decode.counter("handoff_failures")) == (6, 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_turns_of_an_agent_equal_those_of_a_cold_node(name: str, tmp_path: Path) -> None:
    """Two nodes of each role: turns with tool results, branches and retries over one prefix; a decode node dies."""
    rng, conversation = random.Random(3), random_prompt(1, 40)
    with Served(MODELS[name], tmp_path / "m", ["1", "1"], ["1", "1"]) as served:
        for turn in range(12):
            prompt = [*conversation, *random_prompt(turn, rng.randrange(1, 9))]
            served.check([prompt] * (1 + turn % 2), output=6)  # and a retry at once
            if turn % 3 == 2:  # a branch from an earlier point
                served.check([[*prompt[: rng.randrange(20, len(prompt))], turn]], output=6)
            conversation = [*prompt, *reference_greedy(served.reference, prompt, 6)]
            if turn == 8:
                served.fleet.decode[0].kill()
        assert sum(node.counter("prefix_cached_tokens") for node in served.fleet.prefill) > 0


def test_a_running_answer_moves_when_its_node_dies(tmp_path: Path) -> None:
    prompt = random_prompt(5, 90)
    with Served(MODELS["gpt-oss"], tmp_path / "m", ["1"], ["1", "1"]) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: served.fleet.complete(prompt, 200))

        def running() -> NodeProcess | None:
            busy = (node for node in served.fleet.decode if node.counter("sampled_tokens") > 20)
            return next(busy, None)

        served.fleet.wait_until(lambda: running() is not None, 30.0)
        node = running()
        assert node is not None
        node.kill()
        assert answer.result() == reference_greedy(served.reference, prompt, 200)
