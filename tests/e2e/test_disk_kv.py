"""Nodes whose device and host memory hold few conversations, with files for all: tokens are those of transformers.

python -m pytest -m slow tests/e2e/test_disk_kv.py     all kinds of KV cache, split nodes, V2, harmed files, new weights
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from exact_fleet import Model, Served, check_preemption, random_prompt
from fleet import NodeProcess, add_tokenizer
from test_host_memory import KINDS, PAIRS, begin_conversations, check_conversations, served

from cli.main import main

pytestmark = pytest.mark.timeout(300)

OUTPUT = 8


def disk_flags(path: Path, host: str = "1MB", size: str = "1G") -> tuple[str, ...]:
    return ("--host-kv-memory", host, "--disk-kv", str(path), "--disk-kv-size", size)


def total(nodes: Iterable[NodeProcess], name: str) -> float:
    return sum(node.counter(f"disk_kv_{name}") for node in nodes)


def blocks_on(path: Path) -> list[Path]:
    return list(path.glob("*/*/*-b*"))


def restart(fleet: Served, *nodes: NodeProcess) -> None:
    """Kill the engines of nodes, and start the nodes anew."""
    for node in nodes:
        node.signal_engine(signal.SIGKILL)
        node.wait_ended(10.0)
        node.respawn()
    fleet.fleet.wait_ready()
    decode = fleet.fleet.decode
    num_prefill = len(fleet.fleet.prefill)
    fleet.fleet.wait_until(lambda: all(len(node.describe().connected_peers) == num_prefill for node in decode), 30.0)


def test_killed_node_finds_the_files_of_both(tmp_path: Path) -> None:
    """P is killed amid writes. Both nodes use one directory."""
    with served(KINDS["qwen3"], tmp_path / "m", flags=disk_flags(tmp_path / "kv")) as fleet:
        texts = begin_conversations(3)
        check_conversations(fleet, 2, texts)
        restart(fleet, fleet.fleet.prefill[0])
        check_conversations(fleet, 1, texts)
        assert total(fleet.fleet.prefill, "hit_tokens") > 0
        assert total(fleet.fleet.nodes, "corrupt_blocks") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [(name, *pair) for name in KINDS for pair in [("1", "1"), *PAIRS.get(name, [("tp2", "pp2"), ("pp2", "tp2")])]],
)
def test_conversations_come_back_from_disk(name: str, prefill: str, decode: str, tmp_path: Path) -> None:
    host = "2MB" if name == "qwen3-next" else "1MB"
    with served(KINDS[name], tmp_path / "m", prefill, decode, disk_flags(tmp_path / "kv", host)) as fleet:
        texts = begin_conversations(6)
        check_conversations(fleet, 3, texts)
        restart(fleet, *fleet.fleet.nodes)
        check_conversations(fleet, 1, texts)
        assert total(fleet.fleet.nodes, "hit_tokens") > 0
        assert total(fleet.fleet.nodes, "corrupt_blocks") == 0
        assert total(fleet.fleet.nodes, "failures") == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_conversations_come_back_from_disk_with_runner_v2(tmp_path: Path) -> None:
    flags = ("--block-size", "16", "--kv-cache-memory", "500KB", *disk_flags(tmp_path / "kv"))
    with Served(Model("qwen3", {"num_hidden_layers": 2}), tmp_path / "m", flags=flags, runner="V2") as fleet:
        check_conversations(fleet, 2, begin_conversations(6))
        assert total(fleet.fleet.nodes, "hit_tokens") > 0


@pytest.mark.slow
def test_flipped_bytes_and_truncated_files_are_found(tmp_path: Path) -> None:
    """Each third file is harmed, before nodes with empty memory read them."""
    with served(KINDS["qwen3"], tmp_path / "m", flags=disk_flags(tmp_path / "kv")) as fleet:
        texts = begin_conversations(6)
        check_conversations(fleet, 2, texts)
        for number, path in enumerate(sorted(blocks_on(tmp_path / "kv"))):
            data = bytearray(path.read_bytes())
            if number % 3 == 0:
                data[number % len(data)] ^= 4
                path.write_bytes(data)
            elif number % 10 == 0:
                os.truncate(path, number % len(data))
        restart(fleet, *fleet.fleet.nodes)
        check_conversations(fleet, 2, texts)
        assert total(fleet.fleet.nodes, "corrupt_blocks") > 0


@pytest.mark.slow
def test_directory_may_vanish_while_nodes_serve(tmp_path: Path) -> None:
    chance = random.Random(1)
    with served(KINDS["qwen3"], tmp_path / "m", flags=disk_flags(tmp_path / "kv")) as fleet:
        texts = begin_conversations(6)
        for _ in range(3):
            check_conversations(fleet, 1, texts)
            blocks = blocks_on(tmp_path / "kv")
            for path in chance.sample(blocks, len(blocks) // 2):
                path.unlink(missing_ok=True)
        os.rename(tmp_path / "kv", tmp_path / "elsewhere")
        check_conversations(fleet, 1, texts)
        assert blocks_on(tmp_path / "kv"), "the directory is not made again"


@pytest.mark.slow
def test_small_directory_stays_within_its_size(tmp_path: Path) -> None:
    flags = disk_flags(tmp_path / "kv", host="200KB", size="400KB")
    with served(KINDS["qwen3"], tmp_path / "m", flags=flags) as fleet:
        texts = begin_conversations(6)
        for _ in range(4):
            check_conversations(fleet, 1, texts)
            assert sum(path.stat().st_size for path in blocks_on(tmp_path / "kv")) <= 400_000
        assert total(fleet.fleet.nodes, "evicted_blocks") > 0


@pytest.mark.slow
def test_changed_weights_read_nothing_of_the_old_ones(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        add_tokenizer(make_checkpoint(tmp_path / "v" / name, "qwen3", num_hidden_layers=4, seed=seed))
    kind = KINDS["qwen3"]
    flags = (*disk_flags(tmp_path / "kv"), *kind.memory("1"), "--allow-weight-changes", str(tmp_path / "v"))
    with Served(kind.model, tmp_path / "v" / "a", flags=flags) as fleet:
        nodes = fleet.fleet.nodes
        for name in "aba":
            assert main(["weights", "reload", "--model", name, "--pause", "0", *(node.address for node in nodes)]) == 0
            fleet.fleet.wait_ready()
            reference = reference_model(tmp_path / "v" / name)
            for turn in range(2):
                for seed in range(6):
                    prompt = random_prompt(seed, 150)
                    answer = fleet.fleet.complete(prompt, OUTPUT)
                    assert answer == reference_greedy(reference, prompt, OUTPUT, answer), f"weights {name}, turn {turn}"
        assert len(list((tmp_path / "kv").glob("*/"))) == 2
        assert total(nodes, "hit_tokens") > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_exact_under_preemption(name: str, tmp_path: Path) -> None:
    with served(KINDS[name], tmp_path / "m", flags=disk_flags(tmp_path / "kv", "2MB")) as fleet:
        check_preemption(fleet)
