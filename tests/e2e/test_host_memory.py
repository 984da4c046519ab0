"""Nodes whose KV cache holds one conversation, with host memory for several: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_host_memory.py     all kinds of KV cache, split nodes, V2, preemption, a killed node
"""

from __future__ import annotations

from pathlib import Path

import pytest
from exact_fleet import Model, Served, check_preemption, random_prompt
from test_latent_models import MODELS as LATENT
from test_recurrent_models import MODELS as RECURRENT
from test_window_groups import MODELS as WINDOWS

pytestmark = pytest.mark.timeout(300)

OUTPUT = 8
QWEN3 = Model("qwen3", {})
HOST = ("--host-kv-memory", "64MiB")
# model, and a cache of little more than one sequence of 400 tokens
SIZES: dict[str, tuple[Model, tuple[str, ...]]] = {
    "qwen3": (QWEN3, ("--kv-cache-memory", "700KB")),
    "qwen3-next": (RECURRENT["qwen3-next"], ("--kv-cache-memory", "900KB", "--state-slots", "9")),
    "v3": (LATENT["v3"], ("--kv-cache-memory", "400KB")),
    "gpt-oss": (WINDOWS["gpt-oss"], ("--kv-cache-memory", "1MB")),
}


def check_conversations(served: Served, turns: int = 3, conversations: int = 4) -> None:
    """Continue several conversations in turn: the history of each is evicted between its turns, and comes back."""
    texts = [random_prompt(place, 110 + 7 * place) for place in range(conversations)]
    for turn in range(turns):
        for place, text in enumerate(texts):
            prompt = [*text, *random_prompt(100 * turn + place, 9)]
            answer = served.fleet.complete(prompt, OUTPUT)
            assert answer == served.reference_of(prompt, OUTPUT, answer), f"turn {turn} of conversation {place}"
            texts[place] = [*prompt, *answer]
    for node in served.fleet.nodes:
        assert node.counter("host_kv_corrupt_blocks") == 0
        assert node.counter("host_kv_store_bytes") > 0
    served.wait_idle()


def hit_tokens(served: Served) -> list[float]:
    return [node.counter("host_kv_hit_tokens") for node in served.fleet.nodes]


def test_evicted_conversations_come_back_on_both_nodes(tmp_path: Path) -> None:
    model, memory = SIZES["qwen3"]
    with Served(model, tmp_path / "m", flags=(*memory, *HOST)) as served:
        check_conversations(served)
        prefill, decode = hit_tokens(served)
        assert prefill > 500
        assert decode > 500
        first = served.fleet.prefill[0].counter("prefix_cached_tokens")
        assert first >= prefill, "tokens from host memory count as cached"


SPLIT = [("tp2", "pp2"), ("pp2", "tp2")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("prefill", "decode"), [("1", "1"), *SPLIT], ids=str)
def test_evicted_conversations_come_back(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    model, memory = SIZES[name]
    with Served(model, tmp_path / "m", [prefill], [decode], flags=(*memory, *HOST)) as served:
        check_conversations(served)
        assert all(count > 0 for count in hit_tokens(served))


@pytest.mark.slow
def test_evicted_conversations_come_back_with_runner_v2(tmp_path: Path) -> None:
    model = QWEN3._replace(fields={"num_hidden_layers": 2})
    flags = ("--block-size", "16", "--kv-cache-memory", "500KB", *HOST)
    with Served(model, tmp_path / "m", flags=flags, runner="V2") as served:
        check_conversations(served, turns=2, conversations=4)
        assert served.fleet.decode[0].describe().runner == "V2"
        assert all(count > 0 for count in hit_tokens(served))


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_tokens_are_exact_under_preemption(name: str, tmp_path: Path) -> None:
    model, memory = SIZES[name]
    with Served(model, tmp_path / "m", flags=(*memory, *HOST)) as served:
        check_preemption(served)


@pytest.mark.slow
def test_killed_node_starts_anew_without_its_host_memory(tmp_path: Path) -> None:
    model, memory = SIZES["qwen3"]
    with Served(model, tmp_path / "m", ["1"], ["1", "1"], flags=(*memory, *HOST)) as served:
        check_conversations(served, turns=2)
        served.fleet.decode[0].kill()
        check_conversations_without(served, 0)
        served.fleet.decode[0].respawn()
        served.fleet.wait_ready()
        check_conversations(served, turns=2)


def check_conversations_without(served: Served, place: int) -> None:
    """The other nodes continue."""
    prompt = random_prompt(999 + place, 60)
    answer = served.fleet.complete(prompt, OUTPUT)
    assert answer == served.reference_of(prompt, OUTPUT, answer)
