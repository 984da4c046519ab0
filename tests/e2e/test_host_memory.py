"""Nodes whose KV cache holds one conversation, with host memory for several: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_host_memory.py     all kinds of KV cache, split nodes, V2, preemption, a death
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from exact_fleet import Model, Served, check_preemption, random_prompt
from test_latent_models import MODELS as LATENT
from test_recurrent_models import MIXED
from test_recurrent_models import MODELS as RECURRENT
from test_window_groups import MODELS as WINDOWS

pytestmark = pytest.mark.timeout(300)

OUTPUT = 8
HOST = ("--host-kv-memory", "64MiB")
SLOTS = ("--state-slots", "9")


class Kind(NamedTuple):
    """A model, and its bytes for a cache of little more than one sequence of 400 tokens."""

    model: Model
    num_bytes: int
    flags: tuple[str, ...] = ()
    replicated: bool = False  # by tensor shards

    def memory(self, node: str) -> tuple[str, ...]:
        """Return the flags of a node, of each rank's memory."""
        halved = node != "1" and not (self.replicated and node == "tp2")
        return ("--kv-cache-memory", str(self.num_bytes // 2 if halved else self.num_bytes), *self.flags)


KINDS = {
    "qwen3": Kind(Model("qwen3", {"num_hidden_layers": 4}), 960_000),
    "qwen3-next": Kind(RECURRENT["qwen3-next"]._replace(fields=MIXED), 700_000, SLOTS),
    "v3": Kind(LATENT["v3"], 370_000, replicated=True),
    "gpt-oss": Kind(WINDOWS["gpt-oss"], 980_000),
    "gemma-4-26b": Kind(WINDOWS["gemma-4-26b"], 650_000),
}
PAIRS = {"qwen3-next": [("tp2", "tp2"), ("pp2", "1")]}  # recurrent states need as many shards on both sides


def served(kind: Kind, path: Path, prefill: str = "1", decode: str = "1", flags: tuple[str, ...] = HOST) -> Served:
    memory = (*flags, *kind.memory(prefill))
    return Served(kind.model, path, [prefill], [decode], flags=memory, decode_flags=kind.memory(decode))


def begin_conversations(count: int = 4) -> list[list[int]]:
    return [random_prompt(place, 110 + 7 * place) for place in range(count)]


def check_conversations(fleet: Served, turns: int = 3, texts: list[list[int]] | None = None) -> None:
    """Continue several conversations by turns: each history is evicted between its turns, and comes back.

    ``texts``: the histories, which grow.
    """
    texts = begin_conversations() if texts is None else texts
    for turn in range(turns):
        for place, text in enumerate(texts):
            prompt = [*text, *random_prompt(100 * turn + place, 9)]
            answer = fleet.fleet.complete(prompt, OUTPUT)
            assert answer == fleet.reference_of(prompt, OUTPUT, answer), f"turn {turn} of conversation {place}"
            texts[place] = [*prompt, *answer]
    for node in fleet.fleet.nodes:
        assert node.counter("host_kv_corrupt_blocks") == 0
    fleet.fleet.wait_until(lambda: all(node.counter("host_kv_store_bytes") > 0 for node in fleet.fleet.nodes), 10.0)
    fleet.wait_idle()


def hit_tokens(fleet: Served) -> list[float]:
    return [node.counter("host_kv_hit_tokens") for node in fleet.fleet.nodes]


def wait_for_hits(fleet: Served, tokens: int) -> None:
    """Go on with conversations until each node has had more tokens from host memory.

    A node whose fetches have taken long computes the tokens for a while, and tries again: so a busy machine may.
    """

    def have_come_back() -> bool:
        check_conversations(fleet)
        return min(hit_tokens(fleet)) > tokens

    fleet.fleet.wait_until(have_come_back, 120.0)


def test_evicted_conversations_come_back_on_both_nodes(tmp_path: Path) -> None:
    with served(KINDS["qwen3"], tmp_path / "m") as fleet:
        wait_for_hits(fleet, 500)
        cached = fleet.fleet.prefill[0].counter("prefix_cached_tokens")
        assert cached >= hit_tokens(fleet)[0], "tokens from host memory count as cached"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [(name, *pair) for name in KINDS for pair in [("1", "1"), *PAIRS.get(name, [("tp2", "pp2"), ("pp2", "tp2")])]],
)
def test_evicted_conversations_come_back(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    with served(KINDS[name], tmp_path / "m", prefill, decode) as fleet:
        wait_for_hits(fleet, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_evicted_conversations_come_back_with_runner_v2(tmp_path: Path) -> None:
    model = Model("qwen3", {"num_hidden_layers": 2})
    flags = ("--block-size", "16", "--kv-cache-memory", "500KB", *HOST)
    with Served(model, tmp_path / "m", flags=flags, runner="V2") as fleet:
        check_conversations(fleet, turns=2)
        assert fleet.fleet.decode[0].describe().runner == "V2"
        assert all(count > 0 for count in hit_tokens(fleet))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_exact_under_preemption(name: str, tmp_path: Path) -> None:
    with served(KINDS[name], tmp_path / "m") as fleet:
        check_preemption(fleet)


@pytest.mark.slow
def test_killed_node_begins_anew(tmp_path: Path) -> None:
    """The killed node's host memory is lost. The other node serves its conversations meanwhile."""
    kind = KINDS["qwen3"]
    with Served(kind.model, tmp_path / "m", ["1"], ["1", "1"], flags=(*HOST, *kind.memory("1"))) as fleet:
        check_conversations(fleet, turns=2)
        killed = fleet.fleet.decode[0]
        killed.kill()
        fleet.check([random_prompt(999, 60)])
        killed.respawn()
        fleet.fleet.wait_ready()
        fleet.check([random_prompt(seed, 60) for seed in range(4)])
        fleet.wait_idle()
